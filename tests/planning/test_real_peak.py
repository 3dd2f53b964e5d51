"""Predicted against real peaks on the emulated accelerator, and the public API of plans."""

from tests.support.emulated import run_on_emulator

SCRIPT = """
import tempfile, os
import tflms
from tflms.zoo import graphs
tf.config.experimental.enable_op_determinism()
v1.disable_eager_execution()
build = lambda: graphs.unet3d(size=48, filters=8, device=emulator.device)

def train(case):
    before = emulator.stats().bytes_in_use
    with v1.Session(graph=case.graph) as session:
        session.run(case.init_op)
        losses = []
        for _ in range(3):
            emulator.reset_stats()
            losses.append(float(session.run([case.loss, case.train_op], case.feed_dict())[0]))
        return losses, emulator.stats().peak_bytes - before

out = {}
case = build()
out["plain"] = train(case)
for fraction in (0.9, 0.7):
    case = build()
    plan = tflms.plan(case.graph, {"memory_limit": fraction}, loss=case.loss,
                      fetches=[case.loss, case.train_op])
    path = os.path.join(tempfile.mkdtemp(), "plan.json")
    plan.save(path)
    report = tflms.rewrite(case.graph, plan=tflms.Plan.load(path))
    survived = report.verify()
    out[str(fraction)] = [*train(case), report.predicted_peak_bytes, report.plain_peak_bytes,
                          survived.ok, report.floor_bytes]
    gate = next(g for swap in report.swaps for g in swap.gates)
    later, first = report.orders[0]
    out[f"told {fraction}"] = [report.why(gate), report.why(later), first]
case = graphs.mlp(device=emulator.device)
try:
    tflms.plan(case.graph, {"memory_limit": 0.5}, loss=case.loss, fetches=[case.train_op])
    out["batch"] = ""
except tflms.TflmsError as error:
    out["batch"] = str(error)
case = build()
names = [op.name for op in case.graph.get_operations()]
report = tflms.rewrite(case.graph, {"memory_limit": "1GB"}, loss=case.loss,
                       fetches=[case.loss, case.train_op])
out["unchanged"] = [names == [op.name for op in case.graph.get_operations()],
                    not report.changed, report.notes[0]]
limit = int(1.02 * report.plain_peak_bytes)
case = build()
report = tflms.rewrite(case.graph, {"memory_limit": limit}, loss=case.loss,
                       fetches=[case.loss, case.train_op])
out["ordered"] = [*train(case), limit, report.changed, len(report.orders)]
case = build()
config = tflms.tune(case.graph, strategy="chain_rule", memory_limit=0.85, loss=case.loss,
                    fetches=[case.loss, case.train_op])
report = tflms.rewrite(case.graph, config, loss=case.loss, fetches=[case.loss, case.train_op])
out["tuned"] = [report.predicted_peak_bytes, report.plain_peak_bytes, config.strategy]
result = out
"""


def test_predicted_peaks_are_real_results_are_equal_and_plans_survive_a_file():
    found = run_on_emulator(SCRIPT, memory_bytes="600MB")
    losses, _ = found["plain"]
    for fraction in ("0.9", "0.7"):
        mine, peak, predicted, plain, survived, floor = found[fraction]
        assert mine == losses
        assert abs(peak - predicted) <= 0.05 * peak
        assert predicted <= float(fraction) * plain
        assert floor <= predicted
        assert survived
        gate, later, first = found[f"told {fraction}"]
        assert "has left the device" in gate
        assert f"waits for {first}" in later
    assert "batch_size" in found["batch"]
    same, unchanged, note = found["unchanged"]
    assert same
    assert unchanged
    assert "nothing was changed" in note
    mine, peak, limit, changed, edges = found["ordered"]
    assert mine == losses
    assert changed
    assert edges
    assert peak <= limit
    predicted, plain, strategy = found["tuned"]
    assert predicted <= 0.85 * plain
    assert strategy == "chain_rule"
