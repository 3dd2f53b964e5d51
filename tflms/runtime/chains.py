"""``checkpointing.measure_chain``: from a training step to the chain that its schedules are for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tflms.checkpointing.chain import Chain
from tflms.checkpointing.rivals import save_all
from tflms.checkpointing.stages import Cut, cut
from tflms.checkpointing.weigh import weigh
from tflms.config import Config
from tflms.errors import ConfigError
from tflms.graph.ir import Graph, OpId
from tflms.planning.cost import Costs
from tflms.runtime import hook
from tflms.runtime import read as reading
from tflms.runtime import rewrite as rewriting
from tflms.runtime.job import Job, start
from tflms.runtime.measure import measure_costs
from tflms.runtime.rehearsal import rehearse
from tflms.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a step.

    Attributes:
        output: the values that it hands to the next one; the loss, for the last one.
        first, last: names of its first and last operation.
        forward_ops, backward_ops: how many operations it has.
        forward_seconds, backward_seconds: how long F_all and B take.
        forward_only_seconds: how long F_null takes, which leaves out what the output needs not.
        output_bytes, saved_bytes: of its output, and of all that its backward reads of it.
    """

    output: str
    first: str
    last: str
    forward_ops: int
    backward_ops: int
    forward_seconds: float
    forward_only_seconds: float
    backward_seconds: float
    output_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredChain:
    """A training step as a chain, and how it was cut.

    Attributes:
        chain: what each stage costs.
        stages: what each stage is.
        source: where the times come from: "static" (estimated from shapes) or "measured".
        beside_bytes: what the step needs beside the chain, at the peak of keeping everything:
            variables, gradients of weights, masks (predicted).
        kept: values that cross several stages, as over long skips, and so stay; they are beside
            the chain.
        kept_bytes: what these take.
    """

    chain: Chain
    stages: tuple[Stage, ...]
    source: str
    beside_bytes: int
    kept: tuple[str, ...] = ()
    kept_bytes: int = 0

    def __str__(self) -> str:
        head = f"{len(self.stages)} stages, times {self.source}, {format_bytes(self.beside_bytes)}"
        lines = [f"{head} beside the chain"]
        for number, stage in enumerate(self.stages, start=1):
            lines.append(
                f"{number:4}  {stage.output:40.40}  {stage.forward_ops:4} + {stage.backward_ops:4} "
                f"operations  {format_seconds(stage.forward_seconds):>9} + "
                f"{format_seconds(stage.backward_seconds):>9}  a "
                f"{format_bytes(stage.output_bytes):>9}  saved {format_bytes(stage.saved_bytes):>9}"
            )
        if self.kept:
            size = format_bytes(self.kept_bytes)
            lines.append(f"kept across stages, {size}: {', '.join(self.kept)}")
        return "\n".join(lines)


def measure_chain(
    step: Any,
    *arguments: Any,
    loss: Any = None,
    fetches: Iterable[Any] | Any = (),
    feeds: Callable[[], Mapping[Any, Any]] | Mapping[Any, Any] | None = None,
    init: Any = None,
    config: Config | Mapping[str, Any] | None = None,
) -> MeasuredChain:
    """Return a training step as a chain of stages.

    The stages end where little crosses: at operations that all of the forward phase leads through,
    as long as what they put out is read again by the backward phase, and where several values
    cross, in heavy stages. A network with long skips becomes a chain of blocks whose skips are
    kept. Sizes come from the graph.

    Times and workspaces are measured on the device where ``feeds`` are given (for a ``tf.Graph``)
    or ``config`` says ``cost="measured"`` (for any step: a copy of it runs, with variables of its
    own and made-up data): several steps for F_all and B, then several runs of the forward phase
    alone for F_null and F_ck, which keep nothing. Else they are read from the file that ``cost``
    names, or estimated from shapes, for an accelerator.

    Args:
        step: a training ``tf.Graph``; a function that takes gradients, a ``tf.function`` or not;
            or a compiled Keras model.
        arguments: what the function is called with, or a batch (inputs and labels) for a model.
            The function is traced and not called; the model's weights are not changed.
        loss: of a ``tf.Graph``, as of ``tflms.rewrite``.
        fetches: likewise.
        feeds: what a step of a ``tf.Graph`` is fed, or a function that returns it.
        init: the operation that initialises a ``tf.Graph``'s variables.
        config: ``device``, ``batch_size``, ``cost``.

    Raises:
        GraphError: there are no gradients in the step, or it is no chain.
        ConfigError: ``step`` is none of these, or feeds are given for a function.
    """
    settings = Config.of(config).replace(strategy="none")
    if isinstance(step, tf.Graph):
        job = start(step, settings, loss=loss, fetches=fetches)
        if feeds is None:
            return _weighed(job, forward_only=_forward_only(job))
        measure = functools.partial(
            measure_costs, step, feeds=feeds, init=init, device=settings.device
        )
        names = [job.graph.value_name(v) for v in job.loss]
        return _weighed(job, measure(fetches=fetches), measure(fetches=names) if names else None)
    if feeds is not None:
        raise ConfigError("feeds= is for a tf.Graph; a function is called with its arguments")
    if hasattr(step, "train_step") and hasattr(step, "optimizer"):
        return _of_model(step, arguments, settings)
    if not callable(step):
        raise ConfigError(
            f"measure_chain takes a tf.Graph, a function or a Keras model, not {step!r}"
        )
    function = getattr(step, "python_function", step)
    return _traced(function, arguments, settings)


def _of_model(model: Any, arguments: tuple[Any, ...], settings: Config) -> MeasuredChain:
    if not getattr(model, "compiled", False) or not arguments:
        raise ConfigError("compile the model, and pass a batch: measure_chain(model, x, y)")
    batch = tuple(tf.nest.map_structure(tf.convert_to_tensor, part) for part in arguments)
    if not model.built:
        model(batch[0])
    model.optimizer.build(model.trainable_variables)
    return _traced(lambda *data: model.train_step(data), batch, settings)


def _traced(function: Any, arguments: tuple[Any, ...], settings: Config) -> MeasuredChain:
    found = _Trace()
    with hook.listening(found):
        tf.function(function, jit_compile=False).get_concrete_function(*arguments)
    trace = found.last()
    graph = trace.graph
    losses = list({id(t): t for call in trace.gradients for t in call.targets}.values())
    targets = [t.op for t in graph.outputs if isinstance(t, tf.Tensor)]
    targets = list(dict.fromkeys([*targets, *graph.control_outputs]))
    job = start(graph, settings, loss=losses, fetches=targets)
    return _weighed(job, forward_only=_forward_only(job))


def _forward_only(job: Job) -> Costs | None:
    """Measure the forward phase alone, on a copy of the step, where costs are to be measured."""
    if job.config.cost != "measured" or not job.loss:
        return None
    copy = rehearse(job.read, job.phases, job.config.batch_size)
    names = [job.graph.value_name(v) for v in job.loss]
    try:
        found = measure_costs(
            copy.graph, fetches=names, feeds=copy.feeds, init=copy.init, device=job.config.device
        )
    except tf.errors.ResourceExhaustedError:
        return None  # then the whole step was measured relieved
    other = reading.read(copy.graph).graph
    twins = [other.find(job.graph.op(OpId(n)).name) for n in range(job.graph.original_ops)]
    return dataclasses.replace(
        found,
        seconds=tuple(0.0 if twin is None else found.seconds[twin] for twin in twins),
        workspace=tuple(0 if twin is None else found.workspace[twin] for twin in twins),
    )


class _Trace:
    """Keeps the traces that take gradients."""

    def __init__(self) -> None:
        self._traces: list[hook.Trace] = []

    def traced(self, trace: hook.Trace) -> None:
        if trace.gradients:
            self._traces.append(trace)

    def reused(self, name: str, graph: Any) -> None:
        pass  # inner functions stay closed

    def last(self) -> hook.Trace:
        if not self._traces:
            raise ConfigError("no gradients are taken in the function; pass a whole training step")
        return self._traces[-1]


def _weighed(
    job: Job, costs: Costs | None = None, forward_only: Costs | None = None
) -> MeasuredChain:
    graph = job.graph
    costs = rewriting.costs_of(job) if costs is None else costs
    found = cut(graph, job.phases, weights=job.weights())
    chain = weigh(found, job.weights(), costs, forward_only)
    return MeasuredChain(
        chain, tuple(_stages(job, found, chain)), costs.source,
        max(0, job.before.peak_bytes - save_all(chain).peak_bytes),
        tuple(map(graph.value_name, found.carried)),
        sum(job.weights().nbytes[value] for value in found.carried),
    )  # fmt: skip


def _handed(graph: Graph, found: Cut, number: int) -> str:
    """What a stage hands to the next one, by name; where that is kept, what it makes last."""
    values = found.outputs[number] or graph.op(found.forward[number][-1]).outputs[:1]
    return ", ".join(map(graph.value_name, values))


def _stages(job: Job, found: Cut, chain: Chain) -> Iterator[Stage]:
    graph = job.graph
    for number, (forward, backward) in enumerate(zip(found.forward, found.backward, strict=True)):
        last = number == found.stages - 1
        yield Stage(
            output="the loss" if last else _handed(graph, found, number),
            first=graph.op(forward[0]).name,
            last=graph.op(forward[-1]).name,
            forward_ops=len(forward),
            backward_ops=len(backward),
            forward_seconds=chain.forward_seconds[number],
            forward_only_seconds=chain.forward_only_seconds[number],
            backward_seconds=chain.backward_seconds[number],
            output_bytes=chain.activation_bytes[number + 1],
            saved_bytes=chain.saved_bytes[number],
        )
