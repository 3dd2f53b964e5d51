"""A chunk's step is a function of its own: checkpointing rewrites it as it does any other."""

from __future__ import annotations

import keras
import pytest

import tflms
from tests.local_updates.local_nets import compiled, data, digest
from tflms.local_updates import LocalTrainer, split

CHECKPOINTED = {"strategy": "optimal_checkpointing", "memory_limit": 0.75, "batch_size": 512}


def deep():
    """Twelve equal layers with nothing but their activations to keep."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(32, activation="tanh") for _ in range(12)]
    return keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(5)])


def trained(runtime, chunks, config):
    model = deep()
    trainer = LocalTrainer(model, split(model, chunks=chunks, batch_size=512), runtime=runtime)
    compiled(trainer, "sgd", jit_compile=False)
    x, y = data(1024)
    with tflms.enabled(config or {"strategy": "none"}) as seen:
        trainer.fit(x, y, batch_size=512, epochs=1, shuffle=False, verbose=0)
    return digest(trainer), [len(r.recomputes) for r in seen.reports if r.recomputes]


@pytest.mark.parametrize(("runtime", "chunks"), [("threads", 2), ("fused", 1)])
def test_a_chunk_computes_again_with_the_same_weights_in_the_end(runtime, chunks):
    plain, none = trained(runtime, chunks, None)
    weights, recomputed = trained(runtime, chunks, CHECKPOINTED)
    assert none == []
    assert len(recomputed) >= 1 and sum(recomputed) >= 2
    assert weights == plain
