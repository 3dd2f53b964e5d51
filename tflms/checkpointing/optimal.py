"""The optimal schedules: of the published programme, and of its extension that drops inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tflms.checkpointing.chain import Chain
from tflms.checkpointing.floors import Floors, find_floors
from tflms.checkpointing.grid import Grid
from tflms.checkpointing.operations import Held, Operation, replay
from tflms.checkpointing.patterns import segmented
from tflms.checkpointing.problem import DROPPING, NEVER, ORIGINAL, PLAIN, Form, Problem
from tflms.checkpointing.rebuild import rebuild
from tflms.checkpointing.schedule import Schedule
from tflms.checkpointing.table import Table, fill_table
from tflms.errors import ConfigError, InfeasibleError
from tflms.units import parse_bytes

_MORE, _LESS = 110, 70  # percent of a limit up to and down to which tables answer, if asked to
_AFFORDABLE_SUMS = 1.6e9  # additions in a second pass over the table: about a second


def optimal_schedule(chain: Chain, memory_limit: int | str, slots: int = 500) -> Schedule:
    """Return the quickest memory-persistent schedule that fits in a limit.

    Persistent: a value that F_ck or F_all saves stays until a backward uses it. Within that class
    the schedule is the optimum, to the precision of the slots, where no gradient is larger than
    its activation. Where one is, a schedule that repeats a forward before a backward that the
    recurrence puts first can in rare cases be quicker.

    Memory is divided into slots and sizes are rounded up. Where all sizes share a divisor so large
    that the limit is at most ``slots`` times it, nothing is rounded and the result is exact. Else
    it is the optimum for the rounded sizes or better: memory that rounding set aside is used again
    where the choices allow it, a second way of rounding is tried where that takes little time, and
    what is feasible to the byte is never reported as infeasible. More slots lose less; time and
    memory grow in proportion.

    Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019).

    Args:
        chain: what each stage costs.
        memory_limit: bytes for activations, their gradients and workspaces, the chain's input
            included; parameters, their gradients and optimizer state are not counted.
        slots: into how many parts to divide the memory.

    Raises:
        InfeasibleError: no schedule fits; ``minimum_bytes`` is the least limit that works.
        ConfigError: the limit or the number of slots makes no sense.
    """
    return _solve(chain, memory_limit, slots, "optimal", ORIGINAL, saving=True)


@dataclass(frozen=True, slots=True)
class DropInputs:
    """What dropping inputs of saved stages brings, beside the original optimum.

    Attributes:
        original: the schedule of ``optimal_schedule``; None where only dropping fits.
        dropping: the best schedule found that may drop inputs; never slower than the original.
    """

    original: Schedule | None
    dropping: Schedule

    @property
    def saved_seconds(self) -> float:
        """By how many seconds dropping inputs shortens the original optimum."""
        return (
            math.inf if self.original is None else self.original.makespan - self.dropping.makespan
        )


def drop_inputs(chain: Chain, memory_limit: int | str, slots: int = 500) -> DropInputs:
    """Return the optimum that may drop the input of a saved stage, beside the original optimum.

    The backward of stage l needs a^(l-1), but between F_all and B of stage l nothing forces it to
    stay: the stages before l must run again anyway before their own backward, and doing so just
    before B rebuilds a^(l-1) in passing. ``Kind.F_DROP`` is an F_all that releases its input.

    The result is the optimum of persistent schedules with this one operation more (in an order
    where a dropped input is rebuilt once the gradient of its stage is there). It does not cover
    schedules that break persistence in other ways; those are seldom quicker. Takes seven to ten
    times the time and four times the memory of ``optimal_schedule``.

    Raises:
        InfeasibleError: no schedule fits; ``minimum_bytes`` is the least limit that works.
        ConfigError: the limit or the number of slots makes no sense.
    """
    return Dropping(chain, slots).both(memory_limit)


def revolve_heterogeneous(chain: Chain, memory_limit: int | str, slots: int = 500) -> Schedule:
    """Return the quickest schedule that keeps activations only: each B right after its F_all.

    This is the classical reversal of a chain with checkpoints, for stages of any times and sizes,
    with the exact needs of each operation instead of the largest overhead of all. It never holds
    the saved sets of two stages at once, hence it recomputes every stage but the last.

    Source: the rival of that name in Beaumont et al. (2019); Griewank and Walther (2000) for the
    uniform case.

    Raises:
        InfeasibleError: no such schedule fits; ``minimum_bytes`` is the least limit that works.
        ConfigError: the limit or the number of slots makes no sense.
    """
    return _solve(chain, memory_limit, slots, "revolve_heterogeneous", ORIGINAL, saving=False)


def minimum_memory(chain: Chain) -> int:
    """Return the least limit, to the byte, for which ``optimal_schedule`` finds a schedule."""
    floors = find_floors(Problem.of(chain), ORIGINAL)
    return chain.activation_bytes[0] + floors.least(PLAIN, 1, chain.stages)


def checked_limit(memory_limit: int | str) -> int:
    """Return a limit in bytes.

    Raises:
        ConfigError: it is neither a size nor a positive whole number of bytes.
    """
    if isinstance(memory_limit, str):
        return parse_bytes(memory_limit)
    whole = isinstance(memory_limit, int | np.integer) or (
        isinstance(memory_limit, float) and memory_limit.is_integer()
    )
    if isinstance(memory_limit, bool) or not whole or memory_limit < 0:
        raise ConfigError(
            f"memory_limit is {memory_limit!r}; it must be bytes, such as 8_000_000_000 or '8GiB'"
        )
    return int(memory_limit)


def _solve(
    chain: Chain,
    memory_limit: int | str,
    slots: int,
    strategy: str,
    forms: tuple[Form, ...],
    *,
    saving: bool,
) -> Schedule:
    return Solution(chain, strategy, forms, slots=slots, saving=saving).at(memory_limit)


class Solution:
    """The solved tables of one chain; they answer more limits than the one they were filled for."""

    def __init__(
        self,
        chain: Chain,
        strategy: str,
        forms: tuple[Form, ...] = ORIGINAL,
        *,
        slots: int = 500,
        saving: bool = True,
        around: bool = False,
    ) -> None:
        """Take a chain; nothing is solved before a limit is asked for.

        Args:
            chain: what each stage costs.
            strategy: the name that schedules get.
            forms: of subproblems.
            slots: into how many parts to divide the memory.
            saving: whether the inner results of a stage may be kept while others run.
            around: fill each table for a range of limits around the one that is asked for.

        Raises:
            ConfigError: the number of slots makes no sense.
        """
        if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= 1_000_000:
            raise ConfigError(f"slots is {slots!r}; it must be a whole number from 1 to 1000000")
        self.chain, self.strategy, self.forms = chain, strategy, forms
        self.slots, self.saving, self.around = slots, saving, around
        self._everything: tuple[list[Operation], int] | None = None
        self._problem: tuple[Problem, Floors] | None = None
        self._filled: list[tuple[Grid, Table]] = []

    def at(self, memory_limit: int | str) -> Schedule:
        """Return the quickest schedule of its kind within a limit.

        Raises:
            InfeasibleError: no schedule fits; ``minimum_bytes`` is the least limit that works.
            ConfigError: the limit makes no sense.
        """
        chain, limit, strategy = self.chain, checked_limit(memory_limit), self.strategy
        if self.saving:
            if self._everything is None:
                everything = segmented(chain.stages, [1])
                self._everything = everything, replay(chain, everything).peak_bytes
            if self._everything[1] <= limit:
                return Schedule.of(
                    chain, self._everything[0], strategy=strategy, memory_limit=limit
                )
        if self._problem is None:
            problem = Problem.of(chain, saving=self.saving)
            self._problem = problem, find_floors(problem, self.forms)
        problem, floors = self._problem
        least = floors.least(PLAIN, 1, problem.stages)
        available = limit - chain.activation_bytes[0]
        if available < least:
            raise infeasible(strategy, limit, chain.activation_bytes[0] + least)
        found: list[Schedule] = []
        for grid, table in self._tables(problem, floors, available):
            operations = rebuild(problem, floors, grid, table, available)
            loss = 0 if grid.exact else _rounding_loss(chain, operations, grid)
            found.append(
                Schedule.of(
                    chain,
                    operations,
                    strategy=strategy,
                    memory_limit=limit,
                    exact=grid.exact,
                    rounding_loss_bytes=loss,
                )
            )
        return min(found, key=lambda schedule: schedule.makespan)  # of equals the first

    def _tables(self, problem: Problem, floors: Floors, available: int) -> list[tuple[Grid, Table]]:
        """Return tables that answer a limit, those at hand if they do."""
        if self._filled:
            grid = self._filled[0][0]
            if (grid.limit if grid.least is None else grid.least) <= available <= grid.limit:
                return self._filled
        top, slots, lowest = available, self.slots, None
        if self.around:
            top, lowest = available * _MORE // 100, available * _LESS // 100
            slots = slots * _MORE // 100
        first = Grid.of(problem, top, slots, least=lowest)
        self._filled = []  # lets go of the old tables before there are new ones
        self._filled = [
            (grid, fill_table(problem, floors, grid, self.forms))
            for grid in _grids(problem, first, self.forms)
        ]
        return self._filled


class Dropping:
    """The tables with and without dropped inputs of one chain."""

    def __init__(self, chain: Chain, slots: int = 500, *, around: bool = False) -> None:
        """Take a chain, as ``Solution`` does."""
        self._original = Solution(chain, "optimal", slots=slots, around=around)
        self._dropping = Solution(chain, "drop_inputs", DROPPING, slots=slots, around=around)

    def at(self, memory_limit: int | str) -> Schedule:
        """Return the quickest schedule that may drop inputs.

        Raises:
            InfeasibleError: no schedule fits; ``minimum_bytes`` is the least limit that works.
            ConfigError: the limit makes no sense.
        """
        return self.both(memory_limit).dropping

    def both(self, memory_limit: int | str) -> DropInputs:
        """Return that beside the original optimum; raises as ``at`` does."""
        try:
            original = self._original.at(memory_limit)
        except InfeasibleError:
            original = None
        dropping = self._dropping.at(memory_limit)
        if original is not None and original.makespan <= dropping.makespan:
            dropping = Schedule.of(
                original.chain,
                original.operations,
                strategy="drop_inputs",
                memory_limit=original.memory_limit,
                exact=dropping.exact,
                rounding_loss_bytes=dropping.rounding_loss_bytes,
            )
        return DropInputs(original, dropping)


def _grids(problem: Problem, grid: Grid, forms: tuple[Form, ...]) -> list[Grid]:
    """Return the ways of rounding to try: both where rounding matters and the time allows it."""
    sums = len(forms) ** 1.5 * problem.stages**3 / 6 * grid.slots * grid.reached_share(problem)
    return [grid] if grid.exact or sums > _AFFORDABLE_SUMS else [grid, grid.carrying()]


def infeasible(strategy: str, limit: int, minimum_bytes: int) -> InfeasibleError:
    """Return the error for a limit that a strategy cannot meet."""
    unreachable = minimum_bytes >= NEVER
    hint = "no limit works" if unreachable else f"the least limit that works is {minimum_bytes}"
    return InfeasibleError(
        f"no schedule of {strategy} fits in {limit} bytes; {hint}. Raise memory_limit, or make "
        "the activations smaller (batch size, precision)",
        minimum_bytes=None if unreachable else minimum_bytes,
    )


def _rounding_loss(chain: Chain, operations: list[Operation], grid: Grid) -> int:
    """Return the largest excess of rounded over true sizes of what is held at any time."""
    problem = Problem.of(chain)
    rounded = {
        Held.ACTIVATION: grid.stored(problem.output) * grid.slot_bytes - problem.output,
        Held.SAVED: grid.stored(problem.saved) * grid.slot_bytes - problem.saved,
        Held.GRADIENT: np.zeros(problem.stages + 1),  # part of what an operation needs, not stored
    }
    rounded[Held.ACTIVATION][0] = 0.0  # the chain's input is set aside before memory is divided
    excess = worst = 0.0
    for step in replay(chain, operations).steps:
        excess += rounded[step.produced.held][step.produced.stage]
        excess -= sum(rounded[item.held][item.stage] for item in step.released)
        worst = max(worst, excess)
    return math.ceil(worst)
