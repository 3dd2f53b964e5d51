from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.local_updates.local_nets import data, digest, losses, mlp
from tflms.errors import ConfigError
from tflms.local_updates import ChunkError, split
from tflms.local_updates.pipeline import PipelineTrainer

X, Y = data()
BATCHES = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, 96, 32)]


def plain():
    model = mlp(norm=False, dropout=0)
    model.compile(optimizer="adam", loss=losses(), jit_compile=False)
    model.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    return model


def pipelined(micro_batches, chunks=3):
    model = mlp(norm=False, dropout=0)
    trainer = PipelineTrainer(model, split(model, chunks=chunks), micro_batches=micro_batches)
    trainer.compile("adam", losses())
    return model, trainer, trainer.fit(BATCHES)


def test_one_micro_batch_is_plain_training_bit_for_bit():
    assert digest(pipelined(1)[0]) == digest(plain())


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    expected = plain()
    model, trainer, found = pipelined(4)
    for a, b in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)
    assert len(found) == 3 and trainer.batches == 3
    assert trainer.bubble == pytest.approx(2 / 6)


def test_each_cut_is_crossed_both_ways():
    _, trainer, _ = pipelined(4)
    for cut, nbytes in zip(trainer.plan.cuts, trainer.cut_bytes, strict=True):
        assert nbytes > 2 * cut.nbytes * len(BATCHES)
        assert nbytes < 2.6 * cut.nbytes * len(BATCHES)  # small batches: headers and labels count


def test_a_failing_chunk_ends_the_pipeline():
    model = mlp(norm=False, dropout=0)
    trainer = PipelineTrainer(model, split(model, chunks=2))
    with pytest.raises(ConfigError, match="compile"):
        trainer.fit(BATCHES)
    trainer.compile(keras.optimizers.SGD(), losses())
    with pytest.raises(ChunkError, match="chunk 0"):
        trainer.fit([(X[:32, :3], Y[:32])])
