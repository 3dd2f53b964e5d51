"""What each strategy would do on one chain, at any limit: what was solved once is asked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tflms.checkpointing import rivals
from tflms.checkpointing.chain import Chain
from tflms.checkpointing.optimal import Dropping, Solution
from tflms.checkpointing.revolve import all_revolve
from tflms.checkpointing.rivals import Listed
from tflms.checkpointing.schedule import Schedule

MANY_STAGES = 100  # for more, a table takes seconds to fill
_SLOTS, _SLOTS_FOR_MANY = 500, 200  # into which drop_inputs divides memory: it takes four tables


class Choices(Protocol):
    """The schedules of one strategy for one chain."""

    def at(self, memory_limit: int | None, /) -> Schedule:
        """Return the quickest within a limit, or raise ``InfeasibleError``."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A strategy that is asked anew each time, as it has one schedule to offer."""

    chain: Chain
    solve: Callable[[Chain, int | None], Schedule]

    def at(self, memory_limit: int | None, /) -> Schedule:
        return self.solve(self.chain, memory_limit)


@dataclass(frozen=True, slots=True)
class _Solved:
    """A strategy with tables."""

    tables: Solution | Dropping

    def at(self, memory_limit: int | None, /) -> Schedule:
        assert memory_limit is not None  # Config asks for one
        return self.tables.at(memory_limit)


def _dropping(chain: Chain) -> Choices:
    slots = _SLOTS if chain.stages <= MANY_STAGES else _SLOTS_FOR_MANY
    return _Solved(Dropping(chain, slots, around=True))


CHOICES: dict[str, Callable[[Chain], Choices]] = {
    "optimal_checkpointing": lambda c: _Solved(Solution(c, "optimal", around=True)),
    "drop_inputs": _dropping,
    "save_all": lambda c: _Asked(c, rivals.save_all),
    "recompute_all": lambda c: _Asked(c, rivals.recompute_all),
    "periodic": lambda c: _Asked(c, rivals.periodic),
    "best_periodic": lambda c: Listed(c, "best_periodic", rivals.all_periodic(c)),
    "sqrt_n": lambda c: Listed(c, "sqrt_n", rivals.all_sqrt_n(c)),
    "revolve": lambda c: Listed(c, "revolve", all_revolve(c.stages)),
    "revolve_heterogeneous": lambda c: _Solved(
        Solution(c, "revolve_heterogeneous", saving=False, around=True)
    ),
}
# Strategies that may take any schedule, and those that they look at beside their own: none that
# executes more quickly within the limit is passed over.
BESIDE = {
    "optimal_checkpointing": ("revolve_heterogeneous", "best_periodic", "sqrt_n", "revolve"),
    "drop_inputs": (
        "optimal_checkpointing", "revolve_heterogeneous", "best_periodic", "sqrt_n", "revolve"
    ),
}  # fmt: skip
