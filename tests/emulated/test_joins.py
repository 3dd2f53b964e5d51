"""On the emulated accelerator: a U-Net in less than its largest concatenation needs at once."""

from __future__ import annotations

import pytest

from tests.support.emulated import run_on_emulator

CODE = """
import tflms
from tflms.zoo.graphs import unet3d

tf.config.experimental.enable_op_determinism()
v1.disable_eager_execution()
config = v1.ConfigProto(inter_op_parallelism_threads=threads)

def build():
    return unet3d(32, batch=4, normalize=True, optimizer_name="sgd", device=emulator.device)

def trained(case):
    with v1.Session(graph=case.graph, config=config) as session:
        session.run(case.init_op)
        emulator.reset_stats()
        step = [case.loss, case.train_op]
        losses = [session.run(step, case.feed_dict())[0].tobytes().hex() for _ in range(2)]
        peak = emulator.stats().peak_bytes
        left = session.run(case.graph.get_collection("trainable_variables"))
    return losses, [value.tobytes().hex() for value in left], peak

plain = trained(build())
planned = build()
fetches = [planned.loss, planned.train_op]
plan = tflms.plan(planned.graph, {"memory_limit": limit}, loss=planned.loss, fetches=fetches)
plan.save(file)
case = build()
report = tflms.rewrite(case.graph, plan=tflms.Plan.load(file))
swap = next(swap for swap in report.swaps if swap.value == "join0")
now = trained(case)
result = {
    "plain": plain[:2], "rewritten": now[:2], "plain_peak": plain[2], "peak": now[2],
    "predicted": report.predicted_peak_bytes, "floor": report.floor_bytes,
    "planned": plan.predicted_peak_bytes, "ins": len(swap.swap_ins),
    "why": str(report.why("join0")), "alive": report.verify().ok,
}
"""


@pytest.mark.parametrize("threads", [1, 8])
def test_the_host_puts_together_what_the_device_could_not_hold(threads, tmp_path):
    file = str(tmp_path / "plan.json")
    found = run_on_emulator(CODE, memory_bytes="500MB", threads=threads, limit=0.35, file=file)
    assert found["rewritten"] == found["plain"]
    assert found["peak"] < 0.35 * found["plain_peak"]
    assert found["planned"] == found["predicted"]
    assert found["alive"] and found["ins"] == 2 and "host" in found["why"]
