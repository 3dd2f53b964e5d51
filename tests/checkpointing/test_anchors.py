"""What recomputation waits for: the total gradient of a block, where waiting changes no number."""

from __future__ import annotations

from tflms.checkpointing.stages import cut
from tflms.config import Config
from tflms.runtime.job import start
from tflms.zoo import graphs


def test_a_block_with_a_skip_is_recomputed_when_its_gradients_are_summed():
    """Not when the gradient enters the block behind it, of which all would still be in memory."""
    made = graphs.resnet18(32, 2, width=4)
    config = Config.of({"strategy": "none"})
    job = start(made.graph, config, loss=made.loss, fetches=[made.train_op])
    graph, found = job.graph, cut(job.graph, job.phases)
    sums = [graph.op(anchor).type for anchor in found.anchors].count("AddN")
    assert sums >= 7  # eight blocks: behind the last one there is none


def test_nothing_waits_for_a_sum_that_grappler_joins_with_another():
    made = graphs.deep_resnet(29, 8, 2, filters=2)
    config = Config.of({"strategy": "none"})
    job = start(made.graph, config, loss=made.loss, fetches=[made.train_op])
    graph, found = job.graph, cut(job.graph, job.phases)
    for anchor in map(graph.op, found.anchors):
        readers = {use.op for v in anchor.outputs for use in graph.uses(v)}
        if anchor.type == "AddN" and len(readers) == 1:
            assert not {"AddN", "AddV2"} & {graph.op(reader).type for reader in readers}
