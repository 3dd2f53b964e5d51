"""What the tests of checkpointing compare with: recorded optima, a search, random chains."""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tflms.checkpointing import Chain, Kind, Operation

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "rotor_cases.json").read_text()
)
CASES: list[dict[str, Any]] = RECORDED["cases"] + RECORDED["extension_cases"]
SUITE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (f"{name}-{expected['memory']}", suite["chain"], expected)
    for name, suite in RECORDED["upstream_suite"].items()
    if name != "note"
    for expected in suite["expect"]
]
_KINDS = {"Fall": Kind.F_ALL, "Fck": Kind.F_CK, "Fnull": Kind.F_NULL, "B": Kind.B}


def recorded_chain(data: dict[str, Any]) -> Chain:
    """Read a chain of the recorded cases (per-stage lists there begin with an unused entry)."""
    return Chain(
        forward_seconds=data["uf"][1:],
        backward_seconds=data["ub"][1:],
        activation_bytes=data["wa"],
        saved_bytes=data["wabar"][1:],
        gradient_bytes=data["wdelta"],
        forward_overhead_bytes=data["of"][1:],
        backward_overhead_bytes=data["ob"][1:],
        forward_only_overhead_bytes=data["of_null"][1:],
    )


def suite_chain(data: dict[str, Any]) -> Chain:
    """Read a chain of the recorded suite and add its loss stage."""
    return Chain(
        forward_seconds=[*data["uf"], 0],
        backward_seconds=[*data["ub"], 0],
        activation_bytes=[*data["wa"], 0],
        saved_bytes=[*data["wabar"], 0],
        forward_overhead_bytes=[*data["of"], 0],
        backward_overhead_bytes=[*data["ob"], 0],
    )


def recorded_schedule(pairs: list[list[Any]]) -> list[Operation]:
    return [Operation(_KINDS[kind], stage) for kind, stage in pairs]


State = tuple[tuple[str, ...], int]


def least_time(chain: Chain, limit: int, *, may_drop: bool = False) -> float | None:
    """Find the least time of all memory-persistent schedules by search; None if none fits.

    Dijkstra over what memory holds. Items are written "a3" (free to be released by F_null), "A3"
    (an activation that a forward kept, and that only a backward releases) and "S3" (a saved set).
    With ``may_drop``, an F_all may also release the activation it reads, kept or not.
    """
    start: State = (("a0",), chain.stages)
    best = {start: 0.0}
    tie = itertools.count()
    queue = [(0.0, next(tie), start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state[1] == 0:
            return seconds
        if seconds > best[state]:
            continue
        for cost, peak, after in _moves(chain, state, may_drop):
            if peak <= limit and seconds + cost < best.get(after, float("inf")):
                best[after] = seconds + cost
                heapq.heappush(queue, (seconds + cost, next(tie), after))
    return None


def _moves(chain: Chain, state: State, may_drop: bool) -> Iterator[tuple[float, int, State]]:
    items, gradient = set(state[0]), state[1]
    used = chain.gradient_bytes[gradient] + sum(
        chain.saved_bytes[int(item[1:]) - 1]
        if item[0] == "S"
        else chain.activation_bytes[int(item[1:])]
        for item in items
    )

    def then(new: set[str], left: int = gradient) -> State:
        return tuple(sorted(new)), left

    for stage in range(1, gradient + 1):
        i = stage - 1
        free, kept, saved = f"a{i}", f"A{i}", f"S{i}"
        for source in sorted(items & {free, kept, saved}):
            rest = items - {source}
            keeping = rest | {kept if source == free else source}
            if f"S{stage}" not in items:
                peak = used + chain.saved_bytes[i] + chain.forward_overhead_bytes[i]
                cost = chain.forward_seconds[i]
                yield cost, peak, then(keeping | {f"S{stage}"})
                if may_drop and source != saved:
                    yield cost, peak, then(rest | {f"S{stage}"})
            if not items & {f"a{stage}", f"A{stage}"}:
                peak = used + chain.activation_bytes[stage] + chain.forward_only_overhead_bytes[i]
                cost = chain.forward_only_seconds[i]
                yield cost, peak, then(keeping | {f"a{stage}"})
                if source == free:
                    yield cost, peak, then(rest | {f"a{stage}"})
            if stage == gradient and f"S{stage}" in items:
                peak = used + chain.gradient_bytes[i] + chain.backward_overhead_bytes[i]
                after = (rest if source != saved else items) - {f"S{stage}"}
                yield chain.backward_seconds[i], peak, then(after, i)


@st.composite
def chains(draw: st.DrawFn, *, most_stages: int = 5, large_gradients: bool = False) -> Chain:
    """Draw a short chain with small whole numbers, with or without a loss stage."""
    n = draw(st.integers(1, most_stages))

    def numbers(count: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

    activations = numbers(n + 1, 6)
    extra = numbers(n, 9)
    if draw(st.booleans()):  # the last stage is a loss
        activations[n] = extra[n - 1] = 0
    gradients = (
        numbers(n + 1, 12)
        if large_gradients
        else [draw(st.integers(0, size)) for size in activations]
    )
    return Chain(
        forward_seconds=numbers(n, 12),
        backward_seconds=numbers(n, 12),
        activation_bytes=activations,
        saved_bytes=[a + b for a, b in zip(activations[1:], extra, strict=True)],
        gradient_bytes=draw(st.sampled_from([activations, gradients])),
        forward_overhead_bytes=numbers(n, draw(st.sampled_from([0, 4, 12]))),
        backward_overhead_bytes=numbers(n, draw(st.sampled_from([0, 4]))),
        forward_only_seconds=draw(st.one_of(st.none(), st.just(numbers(n, 12)))),
        forward_only_overhead_bytes=draw(st.one_of(st.none(), st.just(numbers(n, 14)))),
    )


def recurrence(chain: Chain, limit: int, *, may_drop: bool = False) -> float:
    """Evaluate the published recurrence, one number at a time; infinite if nothing fits.

    ``early`` says that a^(s-1) goes with the F_all of stage s and the work ends before its
    backward, ``late`` that the F_all of stage t is done (both only with ``may_drop``).
    """
    a, d = chain.activation_bytes, chain.gradient_bytes
    kept = (0, *chain.saved_bytes)
    u, v = (0, *chain.forward_seconds), (0, *chain.forward_only_seconds)
    b = (0, *chain.backward_seconds)
    o, w = (0, *chain.forward_overhead_bytes), (0, *chain.forward_only_overhead_bytes)
    p = (0, *chain.backward_overhead_bytes)

    @functools.cache
    def least(s: int, t: int, m: int, early: bool = False, late: bool = False) -> float:
        tail = d[t] + (kept[t] if late else 0)
        forward = m >= tail + kept[s] + o[s]
        backward = m >= d[s] + kept[s] + d[s - 1] + p[s]
        if s == t:
            if (early and late) or not ((late or forward) and (early or backward)):
                return math.inf
            return (0 if late else u[s]) + (0 if early else b[s])
        best = math.inf
        if forward and early:
            best = u[s] + least(s + 1, t, m + a[s - 1] - kept[s], False, late)
        elif forward and backward:
            best = u[s] + b[s] + least(s + 1, t, m - kept[s], False, late)
        for at in range(s + 1, t + 1):
            run = range(s, at)
            if m < tail + max(w[j] + a[j] + (a[j - 1] if j > s else 0) for j in run):
                break
            forwards, rest = sum(v[j] for j in run), m - a[at - 1]
            keeping = least(at, t, rest, False, late) + least(s, at - 1, m, early)
            best = min(best, forwards + keeping)
            if may_drop and not (late and at == t):
                dropping = least(at, t, rest, True, late) + least(s, at, m, early, True)
                best = min(best, forwards + dropping)
        return best

    return least(1, chain.stages, limit - a[0])
