"""What a rewrite did and why: swaps, recomputations, refusals, sizes; every figure labelled."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms import units
from tflms.rewriting.engine import Refusal

FORMAT = 1  # of the JSON form


@dataclass(frozen=True, slots=True)
class Swap:
    """One value that is parked on the host.

    Attributes:
        value: its name.
        nbytes: its size; None where the graph does not tell.
        swap_out: the inserted operation that copies it to the host, or makes it there.
        swap_ins: the inserted operations that bring it back; none where only what the host makes
            of it comes back.
        anchors: what each of them waits for.
        uses: the operations that read it after it came back.
        gone_level: level of its last use before it leaves.
        back_level: level of the first anchor.
        gates: operations that wait until it has left.
        joined: the host puts it together from its parts, and the device never does.
    """

    value: str
    nbytes: int | None
    swap_out: str
    swap_ins: tuple[str, ...]
    anchors: tuple[str, ...]
    uses: tuple[str, ...]
    gone_level: int
    back_level: int
    gates: tuple[str, ...] = ()
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """One operation that runs again for the backward phase."""

    op: str
    clones: tuple[str, ...]
    anchor: str


@dataclass(frozen=True, slots=True)
class Survival:
    """How many inserted operations are left after TensorFlow's own graph optimizers ran.

    Attributes:
        expected: how many the rewrite inserted for what was run.
        survived: how many of them are in the optimised graphs.
        missing: names of those that are not.
    """

    expected: int
    survived: int
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether all of them survived; a rewrite that only fixes an order inserts none."""
        return not self.missing


@dataclass(slots=True)
class Report:
    """What was done to one graph.

    Sizes are bytes. ``plain_peak_bytes`` and ``predicted_peak_bytes`` are predictions of the
    simulator for the graph before and after; ``measured`` holds what ``measure`` found:
    ``peak_bytes`` of the device and ``held_bytes`` of it before the step, ``step_seconds``, and
    ``to_host_bytes`` and ``to_device_bytes`` of
    a step, as far as the device tells.
    """

    strategy: str
    config: dict[str, Any]
    graph_ops: int
    inserted_ops: int
    levels: int
    subject: str = ""  # the function that the graph belongs to
    swaps: tuple[Swap, ...] = ()
    recomputes: tuple[Recompute, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    plain_peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    predicted_seconds: float | None = None
    plain_seconds: float | None = None
    floor_bytes: int | None = None
    host_bytes: int = 0
    moved_bytes: int = 0
    unknown_sizes: int = 0
    unknown_ops: tuple[str, ...] = ()
    orders: tuple[tuple[str, str], ...] = ()  # (operation, what it waits for), added by the plan
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)
    survival: Survival | None = None
    inserted_names: tuple[str, ...] = field(default=(), repr=False)
    facts: dict[str, str] = field(default_factory=dict, repr=False)
    _verify: Callable[[Any], Survival] | None = field(default=None, repr=False, compare=False)
    _measure: Callable[..., dict[str, Any]] | None = field(default=None, repr=False, compare=False)

    @property
    def changed(self) -> bool:
        """Whether the graph was changed at all."""
        return self.inserted_ops > 0 or bool(self.orders)

    def verify(self, session_config: Any = None) -> Survival:
        """Check on the optimised graphs that what was inserted is still there.

        For a ``tf.Graph``, TensorFlow optimises and partitions it in a session of its own, with
        ``session_config``, without running the step; for a function, the optimised graphs of its
        runs are looked at.

        Raises:
            TflmsError: the check is not possible here; the message says why.
        """
        from tflms.errors import TflmsError

        if self._verify is None:
            raise TflmsError(
                "this report was loaded from a file or nothing was changed; there is no graph to "
                "look at"
            )
        self.survival = self._verify(session_config)
        return self.survival

    def measure(self, step: Callable[[], Any], *, steps: int = 3) -> dict[str, Any]:
        """Run training steps and keep their peak and time beside the predicted ones.

        The peak is the whole device's, whatever else lies there: other models, data sets, and what
        Keras leaves behind of models that are gone. What is in use before the steps is told beside
        it. The step is called once more before, so that what only a first call does (tracing,
        optimising the graph) is left out.

        Args:
            step: runs one training step of the rewritten graph and waits for its end, such as
                ``lambda: session.run(fetches, feeds)``.
            steps: how many; the largest peak and the median time count.

        Returns:
            the figures, which ``measured`` keeps.

        Raises:
            ConfigError: ``steps`` is less than 1.
            TflmsError: this report was loaded from a file, or no device here tells its peak.
        """
        from tflms.errors import ConfigError, TflmsError

        if steps < 1:
            raise ConfigError(f"steps is {steps}; at least 1 is run")
        if self._measure is None:
            raise TflmsError(
                "this report was loaded from a file; measure with the report that rewrite returned"
            )
        self.measured = self._measure(step, steps)
        return self.measured

    def why(self, name: str) -> str:
        """Say what was decided about an operation or value, and for which reason.

        Raises:
            GraphError: there is no operation of that name.
        """
        from tflms.errors import GraphError

        bare = name.removesuffix(":0")
        for swap in self.swaps:
            if bare in (swap.value, swap.swap_out, *swap.swap_ins):
                size = "unknown size" if swap.nbytes is None else units.format_bytes(swap.nbytes)
                gates = f"; {', '.join(swap.gates)} waits until it has left" if swap.gates else ""
                if not swap.swap_ins:
                    return f"{swap.value} ({size}) is put together with others on the host{gates}"
                if swap.joined:
                    return (
                        f"{swap.value} ({size}) is put together on the host: it comes in for "
                        f"{', '.join(swap.uses)} when {', '.join(swap.anchors)} has run"
                    )
                return (
                    f"{swap.value} ({size}) is swapped: it leaves after level {swap.gone_level} "
                    f"and comes back for {', '.join(swap.uses)} when "
                    f"{', '.join(swap.anchors)} has run{gates}{self._waits(bare)}"
                )
        for recompute in self.recomputes:
            if bare == recompute.op or bare in recompute.clones:
                return f"{recompute.op} is recomputed when {recompute.anchor} has run"
        for refusal in self.refusals:
            if bare in refusal.culprits:
                return f"{bare} is kept: rule {refusal.rule} was refused, {refusal.reason}"
        waits = self._waits(bare)
        if bare in self.facts:
            return f"{bare} is kept: {self.facts[bare]}{waits}"
        raise GraphError(f"there was no operation {name!r} in the graph that this report is about")

    def _waits(self, op: str) -> str:
        """Say what an operation was made to wait for by the plan."""
        gone = [swap.value for swap in self.swaps if op in swap.gates]
        before = [first for later, first in self.orders if later == op]
        told = ""
        if gone:
            told += f"; it waits until {', '.join(gone)} has left the device"
        if before:
            told += f"; it waits for {', '.join(before)}, so that the planned order is kept"
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, with stable keys."""
        data = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("_verify", "_measure", "facts")
        }
        plain: dict[str, Any] = json.loads(json.dumps(data, default=_plain))
        return {"format": FORMAT, **plain}

    def to_json(self, indent: int | None = 2) -> str:
        """Return the report as JSON with stable keys."""
        return json.dumps(self.to_dict(), indent=indent)

    def save(self, path: str | Path) -> None:
        """Write the report to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def __str__(self) -> str:
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(self)
        return console.export_text()

    def __rich__(self) -> Table:
        of = f" of {self.subject}" if self.subject else ""
        table = Table(title=f"tflms: {self.strategy}{of}", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        after = f"{self.graph_ops} operations, {self.inserted_ops} inserted, {self.levels} levels"
        table.add_row("graph", after)
        table.add_row("swapped", f"{len(self.swaps)} values, {_size(self.moved_bytes)} each way")
        if self.recomputes:
            table.add_row("recomputed", f"{len(self.recomputes)} operations")
        table.add_row(
            "peak (predicted)",
            f"{_size(self.plain_peak_bytes)} before, {_size(self.predicted_peak_bytes)} after",
        )
        if self.plain_seconds is not None and self.predicted_seconds is not None:
            table.add_row(
                "step (predicted)",
                f"{units.format_seconds(self.plain_seconds)} before, "
                f"{units.format_seconds(self.predicted_seconds)} after",
            )
        for what, shown in self._found():
            table.add_row(what, shown)
        if self.floor_bytes is not None:
            table.add_row("floor (predicted)", _size(self.floor_bytes))
        table.add_row("host (predicted)", _size(self.host_bytes))
        table.add_row("refused", f"{len(self.refusals)}; {_reasons(self.refusals)}")
        if self.unknown_ops:
            table.add_row("left alone", "unknown types: " + ", ".join(self.unknown_ops[:8]))
        if self.survival is not None:
            alive = f"{self.survival.survived} of {self.survival.expected} inserted operations"
            table.add_row("alive", alive)
        for note in self.notes:
            table.add_row("note", note)
        return table

    def _found(self) -> list[tuple[str, str]]:
        """What was measured, and how far the predictions are from it."""
        rows: list[tuple[str, str]] = []
        for key, value in self.measured.items():
            what = f"{key.removesuffix('_bytes').removesuffix('_seconds')} (measured)"
            if key.endswith("_seconds"):
                told = f"{units.format_seconds(value)}{_off(self.predicted_seconds, value)}"
            elif key == "peak_bytes":
                told = f"{_size(value)}{_off(self.predicted_peak_bytes, value)}"
            else:
                told = _size(value) if key.endswith("_bytes") else str(value)
            rows.append((what.replace("_", " "), told))
        return rows


def _off(predicted: float | None, measured: float) -> str:
    if not predicted or not measured:
        return ""
    return f"; the prediction is off by {predicted / measured - 1:+.1%}"


def _size(nbytes: int) -> str:
    return units.format_bytes(nbytes)


def _reasons(refusals: tuple[Refusal, ...]) -> str:
    if not refusals:
        return "none"
    counts: dict[str, int] = {}
    for refusal in refusals:
        counts[refusal.rule] = counts.get(refusal.rule, 0) + 1
    return ", ".join(f"{rule} {count}" for rule, count in sorted(counts.items()))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
