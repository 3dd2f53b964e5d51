"""One chunk's part of a training step, written once for all runtimes as a generator of events.

The generator runs the forward pass, offers what leaves the chunk, takes cotangents for windows that
end further on, gives cotangents to windows that began earlier, and updates the weights. A runtime
only carries the events: within one graph (fused) or through queues (threads, processes). So the
arithmetic is the same in every runtime by construction.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tflms.local_updates.stage import Stage, examples_in
from tflms.local_updates.windows import Window


@dataclass(frozen=True, slots=True)
class Forward:
    """The tensors that leave the chunk; the next chunk may start with them."""

    outputs: list[Any]


@dataclass(frozen=True, slots=True)
class Back:
    """Cotangents of the chunk's float inputs, for the part of a window in the chunk before."""

    window: Window
    cotangents: list[Any]


@dataclass(frozen=True, slots=True)
class Need:
    """The chunk waits for the cotangents of its float outputs from this window."""

    window: Window


@dataclass(frozen=True, slots=True)
class Done:
    """The chunk's step is complete.

    Attributes:
        gradients: the gradients that were applied; the next chunk's start is ordered behind them.
        loss: the chunk's own loss, or None.
    """

    gradients: list[Any]
    loss: Any | None


Event = Forward | Back | Need | Done


def floats(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that can carry a gradient."""
    return [tensor for tensor in tensors if tensor.dtype.is_floating]


def train_step(
    stage: Stage, inputs: Sequence[Any], labels: Any, weights: Any
) -> Generator[Event, list[Any] | None, None]:
    """Run one batch through a chunk, see the module's docstring.

    Args:
        stage: the chunk.
        inputs: the tensors that enter it; no gradient passes them.
        labels: what the losses compare with.
        weights: weight of each example, or None.

    Yields:
        Forward once, Back and Need as the windows ask, Done at the end. Need is answered by
        sending the cotangents.
    """
    if not stage.windows:
        yield Forward(stage.forward(inputs, training=True))
        yield Done([], None)
        return
    sources = floats(inputs)
    variables = list(stage.block.trainable_variables)
    with tf.GradientTape(persistent=len(stage.windows) > 1) as tape:
        if stage.sends_back:
            tape.watch(sources)
        outputs = stage.forward(inputs, training=True)
        penalties = [tf.reduce_sum(penalty) for penalty in stage.block.losses]
        penalty = _scaled(stage, tf.add_n(penalties)) if penalties else None
    leaving = floats(outputs)
    yield Forward(outputs)

    own: list[Any] | None = None
    head_gradients: list[Any] = []
    loss = None
    if stage.own_window is not None:
        own, head_gradients, loss = _exit(stage, inputs, outputs, penalties, labels, weights)

    gathered: list[list[Any]] = []
    gradients: list[Any] = []
    for window in stage.windows:
        cotangents = own if window.last == stage.index else (yield Need(window))
        assert cotangents is not None
        gathered.append(cotangents)
        if len(stage.windows) == 1:
            # A single window: one backward pass gives the weights' gradient and what goes back.
            back = sources if window.first < stage.index else []
            targets, seeds = _targets(leaving, cotangents, penalty)
            found = tape.gradient(targets, [*variables, *back], output_gradients=seeds)
            gradients = found[: len(variables)]
            if back:
                yield Back(window, _filled(found[len(variables) :], sources))
        elif window.first < stage.index:
            found = tape.gradient(leaving, sources, output_gradients=cotangents)
            yield Back(window, _filled(found, sources))
    if len(stage.windows) > 1:
        share = 1.0 / len(stage.windows)
        mean = [
            tf.add_n(list(parts)) * tf.cast(share, parts[0].dtype)
            for parts in zip(*gathered, strict=True)
        ]
        targets, seeds = _targets(leaving, mean, penalty)
        gradients = tape.gradient(targets, variables, output_gradients=seeds)
    del tape

    updates = [*gradients, *head_gradients]
    if variables or head_gradients:
        stage.optimizer.apply_gradients(zip(updates, stage.trainable, strict=True))
    yield Done([g for g in updates if g is not None], loss)


def _scaled(stage: Stage, loss: Any) -> Any:
    """Return the loss times the optimizer's loss scale (mixed precision), as Keras does."""
    return stage.optimizer.scale_loss(loss)


def _exit(
    stage: Stage,
    inputs: Sequence[Any],
    outputs: list[Any],
    penalties: list[Any],
    labels: Any,
    weights: Any,
) -> tuple[list[Any], list[Any], Any]:
    """Return the cotangents of the chunk's outputs, the head's gradients, and the loss."""
    exit_ = stage.exit
    assert exit_ is not None
    leaving = floats(outputs)
    with tf.GradientTape() as tape:
        tape.watch(leaving)
        predictions = exit_(stage.main(outputs), training=True)
        loss = exit_.compute_loss(
            x=None, y=labels, y_pred=predictions, sample_weight=weights, training=True
        )
        loss = exit_.local_loss(loss, inputs, stage.main(outputs), labels)
        scaled = _scaled(stage, loss)
    head_variables = list(exit_.trainable_variables)
    found = tape.gradient(scaled, [*leaving, *head_variables])
    cotangents = _filled(found[: len(leaving)], leaving)
    total = tf.add_n([loss, *[tf.cast(p, loss.dtype) for p in penalties]]) if penalties else loss
    exit_.track_loss(total, examples=examples_in(outputs))
    exit_.compute_metrics(None, labels, predictions, sample_weight=weights)
    return cotangents, found[len(leaving) :], total


def _targets(
    leaving: list[Any], cotangents: list[Any], penalty: Any | None
) -> tuple[list[Any], list[Any]]:
    """Return what to differentiate and its seeds: penalties count once, whatever the windows."""
    if penalty is None:
        return leaving, cotangents
    return [*leaving, penalty], [*cotangents, tf.ones_like(penalty)]


def _filled(found: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Return gradients with zeros where a tensor does not reach the loss."""
    return [
        tf.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(found, like, strict=True)
    ]
