"""Kernels that do not look whether an allocation failed run out of memory as others do."""

from tests.support.emulated import run_on_emulator

CODE = """
from tflms.zoo import graphs

v1.disable_eager_execution()
net = graphs.resnet50(image=64, batch=8, device=emulator.device)
with v1.Session(graph=net.graph) as session:
    session.run(net.init_op)
    held = emulator.stats().bytes_in_use
    messages = []
    for _ in range(3):
        try:
            session.run(net.train_op, net.feed_dict(0))
            messages.append("trained")
        except tf.errors.ResourceExhaustedError as error:
            messages.append(error.message)
    kept = emulator.stats().bytes_in_use - held
result = {"messages": messages, "kept": kept}
"""


def test_a_onednn_kernel_without_memory_raises_and_gives_everything_back():
    for memory in ("110MB", "120MB", "130MB"):
        got = run_on_emulator(CODE, memory_bytes=memory)
        assert all("OOM" in message for message in got["messages"]), got["messages"]
        assert abs(got["kept"]) < 1e6
