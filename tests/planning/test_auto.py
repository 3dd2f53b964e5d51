"""The planner on graphs of the IR: limits kept, orders fixed, errors that say why."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tflms.config import Config
from tflms.errors import GraphError, InfeasibleError
from tflms.graph import erase, order, text
from tflms.graph.verify import verify
from tflms.planning import allocator, cost, kernels, schedule, simulate
from tflms.planning.allocator import rounded
from tflms.planning.plan import record, replay, structure_hash
from tflms.rewriting.engine import Engine
from tflms.strategies import auto
from tflms.strategies import lines as lines_of

WIDE = 4096  # elements of an activation


def chain_graph(layers=8):
    """Forward: matmul and exp by turns; backward reads every activation again, last first."""
    lines = [f"x = Placeholder() : f32[{WIDE}]"]
    last = "x"
    for i in range(layers):
        lines.append(f"a{i} = Exp({last}) : f32[{WIDE}]")
        lines.append(f"b{i} = Cumsum(a{i}) : f32[{WIDE}]")
        last = f"b{i}"
    lines.append(f"loss = Sum({last}) : f32[]")
    lines.append(f"g{layers} = Fill(loss) : f32[{WIDE}]")
    for i in reversed(range(layers)):
        lines.append(f"h{i} = Cumprod(g{i + 1}) : f32[{WIDE}]")
        lines.append(f"w{i} = Dot(h{i}, b{i}) : f32[]".replace("Dot", "BatchMatMul"))
        lines.append(f"g{i} = Mul(h{i}, a{i}) : f32[{WIDE}]")
    ends = ", ".join([*(f"w{i}" for i in range(layers)), "g0"])
    lines.append(f"train = NoOp() after {ends}")
    return text.parse("\n".join(f"{line} @/device:EMU:0" for line in lines[:-1]) + "\n" + lines[-1])


def phases_of(graph):
    loss = text.value_named(graph, "loss")
    return order.phases(graph, loss=[loss], targets=[text.op_named(graph, "train")])


def prepared(graph):
    weights = cost.sizes(graph)
    return weights, cost.static_costs(graph, weights), phases_of(graph)


def alive_by_hand(graph, weights, sequence, handed_on):
    """Peak by walking: sets of values and counts of readers, with the same takeovers."""
    place = {op: i for i, op in enumerate(sequence)}
    peak = 0
    last = {}
    for op in sequence:
        for value in graph.op(op).outputs:
            readers = [place[u.op] for u in graph.uses(value)]
            last[value] = max([place[op], *readers])
    for now, op in enumerate(sequence):
        total = 0
        for value, end in last.items():
            born = place[graph.value(value).op]
            if born <= now <= end and not (end == now and value in handed_on.get(op, ())):
                total += rounded(weights.nbytes[value])
        peak = max(peak, total)
    return peak


def test_peak_of_a_replay_is_what_counting_by_hand_gives():
    graph = chain_graph()
    weights, costs, phases = prepared(graph)
    step = {op.id for op in graph.ops() if phases.step[op.id]}
    sequence = schedule.list_schedule(graph, weights, step)
    place = {op: i for i, op in enumerate(sequence)}
    handed = {}
    for op_id in sequence:
        op = graph.op(op_id)
        if op.type in kernels.FORWARDING:
            for value in op.inputs:
                last = max(place[u.op] for u in graph.uses(value))
                if last == place[op_id] and weights.nbytes[value] == weights.nbytes[op.outputs[0]]:
                    handed[op_id] = [value]
                    break
    found = simulate.simulate(graph, weights, step, order=sequence, costs=costs)
    assert found.peak_bytes == alive_by_hand(graph, weights, sequence, handed)
    assert found.peak_bytes == max(found.resident)


def test_schedule_is_topological_and_ends_activations_early():
    graph = chain_graph()
    weights, costs, phases = prepared(graph)
    step = {op.id for op in graph.ops() if phases.step[op.id]}
    sequence = schedule.list_schedule(graph, weights, step)
    place = {op: i for i, op in enumerate(sequence)}
    assert sorted(sequence) == sorted(step)
    for op in sequence:
        assert all(place[p] < place[op] for p in graph.predecessors(op))
    planned = simulate.simulate(graph, weights, step, order=sequence, costs=costs)
    plain = simulate.simulate(graph, weights, step, costs=costs)
    assert planned.peak_bytes <= plain.peak_bytes


@pytest.mark.parametrize("fraction", [0.9, 0.7, 0.5])
def test_limit_is_kept_and_the_graph_still_erases(fraction):
    graph = chain_graph(12)
    before = erase.edges(graph)
    weights, costs, phases = prepared(graph)
    step = {op.id for op in graph.ops() if phases.step[op.id]}
    plain = simulate.simulate(graph, weights, step, costs=costs).peak_bytes
    limit = int(fraction * plain)
    config = Config(memory_limit=limit, min_swap_bytes=0)
    outcome = auto.run(graph, phases, config, costs, limit)
    assert outcome.timeline.peak_bytes <= limit < plain
    assert outcome.swapped
    verify(graph)
    erase.check(graph, before)


def test_the_fixed_order_is_the_only_one_for_what_matters():
    graph = chain_graph(6)
    _, costs, phases = prepared(graph)
    outcome = auto.run(graph, phases, Config(memory_limit=1, min_swap_bytes=0), costs, 200_000)
    heavy = [o for o in outcome.order if graph.op(o).type in ("Exp", "Cumsum", "Cumprod", "Mul")]
    reach_all = {o: order.ancestors(graph, [o]) for o in heavy}
    for first, second in pairwise(heavy):
        assert first in reach_all[second], (graph.op(first).name, graph.op(second).name)


def test_below_the_floor_the_error_names_operation_operands_and_smallest_limit():
    graph = chain_graph()
    _, costs, phases = prepared(graph)
    with pytest.raises(InfeasibleError) as caught:
        auto.run(graph, phases, Config(memory_limit=1000, min_swap_bytes=0), costs, 1000)
    error = caught.value
    assert error.details["op"] in str(error)
    assert error.minimum_bytes >= 2 * 4 * WIDE
    assert error.details["operands"][0][1] == 4 * WIDE
    assert str(error.minimum_bytes) in str(error)


@pytest.mark.parametrize("limit", [1000, 4 * WIDE * 3])  # below the floor, and a little above
def test_the_smallest_limit_that_the_error_names_is_met(limit):
    def asked(limit):
        graph = chain_graph()
        _, costs, phases = prepared(graph)
        config = Config(memory_limit=limit, min_swap_bytes=0)
        return graph, auto.run(graph, phases, config, costs, limit)

    with pytest.raises(InfeasibleError) as caught:
        asked(limit)
    named = caught.value.minimum_bytes
    assert named > limit
    graph, again = asked(named)
    assert again.timeline.peak_bytes <= named
    verify(graph)


def test_a_refusal_leaves_the_graph_as_it_was_and_says_that_more_could_be_parked():
    graph = chain_graph()
    before = text.dump(graph)
    _, costs, phases = prepared(graph)
    limit = 200_000  # kept with values on the host
    config = Config(
        memory_limit=limit, host_memory_limit=1000, min_swap_bytes=0, recompute=False
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match=r"so may a host_memory_limit above 1\.0 kB"):
        auto.run(graph, phases, config, costs, limit)
    assert text.dump(graph) == before


def test_planning_is_deterministic():
    dumps = []
    for _ in range(2):
        graph = chain_graph(10)
        _, costs, phases = prepared(graph)
        auto.run(graph, phases, Config(memory_limit=1, min_swap_bytes=0), costs, 220_000)
        dumps.append(text.dump(graph))
    assert dumps[0] == dumps[1]


def ordered_forward(graph, targets):
    sequence = order.topological(graph)
    phases = order.Phases(
        order=tuple(sequence), level=tuple(order.levels(graph, sequence, set(sequence))),
        step=(True,) * graph.size, forward=(True,) * graph.size, backward_start=0,
        activation=(True,) * graph.value_count, guard=tuple(order.guards(graph, sequence)),
        needed_by=order._needed_by(graph, sequence, targets),
    )  # fmt: skip
    engine = Engine(graph, phases, order=sequence)
    links = lines_of.chain(graph, phases, cost.sizes(graph), sequence, 1)
    lines_of.fix_order(engine, links)
    return links


def test_no_order_edge_drags_an_operation_into_a_run_that_does_without_it():
    lines = [
        f"x = Placeholder() : f32[{WIDE}]",
        f"y = Placeholder() : f32[{WIDE}]",
        f"a = Cumsum(x) : f32[{WIDE}]",
        f"b = Cumsum(y) : f32[{WIDE}]",
        "left = Sum(a) : f32[]",
        "right = Sum(b) : f32[]",
    ]
    graph = text.parse("\n".join(f"{line} @/device:EMU:0" for line in lines))
    targets = [text.op_named(graph, name) for name in ("left", "right")]
    assert len(ordered_forward(graph, targets).ops) >= 4
    alone = order.ancestors(graph, [targets[0]])
    assert {graph.op(o).name for o in alone} == {"x", "a", "left"}


@pytest.mark.parametrize("arguments", [True, False])
def test_what_depends_on_the_labels_alone_is_ordered_where_every_run_is_given_them(arguments):
    lines = [
        f"x = Placeholder() : f32[{WIDE}]",
        f"labels = Placeholder() : f32[{WIDE}]",
        f"a = Cumsum(x) : f32[{WIDE}]",
        f"b = Cumsum(labels) : f32[{WIDE}]",
        f"loss = AddN(a, b) : f32[{WIDE}]",
    ]
    graph = text.parse("\n".join(f"{line} @/device:EMU:0" for line in lines))
    for op in graph.ops():
        if op.type == "Placeholder" and arguments:
            op.attrs["argument"] = True
    ordered_forward(graph, [text.op_named(graph, "loss")])
    a, b = text.op_named(graph, "a"), text.op_named(graph, "b")
    ordered = a in order.ancestors(graph, [b]) or b in order.ancestors(graph, [a])
    assert ordered == arguments


def test_nothing_waits_for_a_side_branch_so_that_it_holds_up_no_copies():
    lines = [
        f"x = Placeholder() : f32[{WIDE}]",
        f"labels = Placeholder() : f32[{WIDE}]",
        f"a = Cumsum(x) : f32[{WIDE}]",
        f"side = Cumsum(a) : f32[{WIDE}]",
        f"b = Cumprod(a) : f32[{WIDE}]",
        f"weights = Cumsum(labels) : f32[{WIDE}]",
        f"c = Cumsum(b) : f32[{WIDE}]",
        f"loss = AddN(c, weights) : f32[{WIDE}]",
        f"update = AddN(side, loss) : f32[{WIDE}]",
    ]
    graph = text.parse("\n".join(f"{line} @/device:EMU:0" for line in lines))
    links = ordered_forward(graph, [text.op_named(graph, name) for name in ("loss", "update")])
    firm = {graph.op(op).name for op in links.firm}
    assert {"x", "a", "b", "c"} <= firm
    assert not firm & {"side", "labels", "weights"}
    after = {graph.op(a).name: graph.op(b).name for a, b in links.following().items()}
    assert after["a"] == "b" and after["side"] == "b"


def test_a_plan_is_played_again_on_a_graph_that_was_built_again():
    first = chain_graph(10)
    _, costs, phases = prepared(first)
    config = Config(memory_limit=1, min_swap_bytes=0)
    outcome = auto.run(first, phases, config, costs, 220_000)
    steps = record(outcome.engine.log, first)
    second = chain_graph(10)
    assert (
        structure_hash(second) == structure_hash(chain_graph(10)) != structure_hash(chain_graph(9))
    )
    engine = Engine(second, phases_of(second), order=outcome.order)
    replay(engine, steps)
    assert text.dump(second) == text.dump(first)


def test_a_plan_does_not_fit_another_graph():
    first = chain_graph(10)
    _, costs, phases = prepared(first)
    outcome = auto.run(first, phases, Config(memory_limit=1, min_swap_bytes=0), costs, 220_000)
    steps = record(outcome.engine.log, first)
    other = chain_graph(10)
    engine = Engine(other, phases_of(other))
    swap = next(i for i, (rule, _) in enumerate(steps) if rule == "swap")
    broken = [*steps[:swap], ("swap", {**steps[swap][1], "anchor": text.op_named(other, "train")})]
    with pytest.raises(GraphError, match="does not fit"):
        replay(engine, broken)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 30)), max_size=60))
def test_arena_never_hands_out_the_same_bytes_twice(requests):
    arena = allocator.Arena(256 * 600)
    held = []
    for number, (nbytes, victim) in enumerate(requests):
        if arena.allocate(number, nbytes):
            held.append(number)
        if held and victim % 3 == 0:
            arena.free(held.pop(victim % len(held)))
        spans = sorted(arena._taken.values())
        for (a, n), (b, _) in pairwise(spans):
            assert a + n <= b
        holes = sum(size for size, _ in arena._holes)
        assert holes + arena.in_use == 256 * 600
    for number in held:
        arena.free(number)
    assert arena._holes == [(256 * 600, 0)]


def test_a_replay_of_ten_thousand_operations_takes_under_50_milliseconds():
    import time

    graph = chain_graph(2000)
    weights, costs, phases = prepared(graph)
    step = {op.id for op in graph.ops() if phases.step[op.id]}
    assert len(step) > 10_000
    replayed = simulate.Replay(graph, weights, step, costs)
    sequence = schedule.list_schedule(graph, weights, step)
    replayed.run(sequence)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        replayed.run(sequence)
        seconds.append(time.perf_counter() - started)
    assert np.median(seconds) < 0.05


def blocks(*sizes):
    """An overflow in a device of 100 units: (buffer, units) one behind another, None is a hole."""
    held, at = [], 0
    for buffer, units in sizes:
        if buffer is not None:
            held.append((buffer, at * 256, units * 256))
        at += units
    return tuple(held), at * 256


def test_the_cheapest_stretch_is_cleared_and_never_one_that_must_stay():
    held, capacity = blocks((1, 10), (None, 5), (2, 4), (None, 6), (3, 8), (None, 9), (4, 3))
    found = allocator.Overflow(0, 15 * 256, held, capacity)
    never = lambda buffer: False  # noqa: E731
    price = {1: None, 2: 4.0, 3: 8.0, 4: None}
    assert allocator.cheapest_hole(found, price.get, never) == (2,)
    assert allocator.cheapest_hole(found, {**price, 2: 9.0}.get, never) == (3,)
    assert allocator.cheapest_hole(found, {**price, 2: None, 3: None}.get, never) is None


def test_what_found_no_room_is_told_with_all_that_lay_around_it():
    events = [allocator.Event(1, 512), allocator.Event(2, 512), allocator.Event(3, 512),
              allocator.Event(2, 0), allocator.Event(4, 768)]  # fmt: skip
    assert allocator.overflow([256], events[:4], 256 * 8, steps=1) is None
    found = allocator.overflow([256], events, 256 * 8, steps=1)
    assert (found.event, found.nbytes) == (4, 768)
    assert [buffer for buffer, _, _ in found.blocks] == [-1, 1, 3]


@pytest.mark.parametrize("pace", range(10))
def test_a_plan_packs_at_every_pace_of_copies(pace):
    graph = chain_graph(12)
    weights, costs, phases = prepared(graph)
    limit = 300_000
    outcome = auto.run(graph, phases, Config(memory_limit=limit, min_swap_bytes=0), costs, limit)
    step = {op.id for op in graph.ops() if op.role or phases.step[op.id]}
    replayed = simulate.Replay(graph, cost.with_inserted(graph, weights), step, costs)
    asked = replayed.events([op for op in outcome.engine.witness if op in step], pace)
    waste = allocator.NEVER_WASTED_ON_EMULATOR_NBYTES
    assert allocator.packs(asked.persistent, asked.events, limit, waste=waste)
    held = {}
    for event in asked.events:  # what goes has come, and nothing comes twice
        assert (event.buffer in held) == (not event.nbytes)
        held.pop(event.buffer) if not event.nbytes else held.update({event.buffer: 1})
