"""Costs from measured tables: interpolation, adding up, and runs equal to their steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import ConfigurationError
from simulator.cost.catalogue import DEVICES, MODELS
from simulator.cost.fitted.interpolation import Curve, Grid
from simulator.cost.fitted.operators import AttentionTables, ExpertTables, Links, OperatorTables
from simulator.cost.fitted.table_cost import TableCost
from simulator.cost.model import BatchShape, PrefillChunk
from simulator.cost.roofline.attention import decode_attention
from simulator.cost.spec.model import Experts

LAYERS = 4
AXIS = (0.0, 16.0, 32.0, 1024.0, 4096.0)
REQUESTS = (1.0, 2.0, 64.0, 256.0)


def prefill_ms(new: float, before: float) -> float:
    return 0.01 + 1e-4 * new + 1e-5 * before


def decode_ms(requests: float, context: float) -> float:
    return 0.01 + 2e-6 * requests * context


TABLES = OperatorTables(
    layers=LAYERS,
    hidden_size=64,
    layer=Curve((1.0, 128.0, 2048.0), (0.1, 0.2, 2.0)),
    step=Curve((1.0, 2048.0), (0.01, 0.01)),
    sequence=Curve((1.0, 256.0), (0.3, 0.4)),
    attention=AttentionTables(
        prefill=Grid.from_points((AXIS, AXIS), {(new, old): prefill_ms(new, old) for new in AXIS for old in AXIS}),
        decode=Grid.from_points((REQUESTS, AXIS), {(n, kv): decode_ms(n, kv) for n in REQUESTS for kv in AXIS}),
    ),
)
UNEVEN = decode_attention(MODELS["Llama-3.1-8B"], DEVICES["RTX-PRO-6000"], 1)


def decode(contexts: list[int]) -> BatchShape:
    return BatchShape(decode_context_tokens=np.array(contexts, dtype=np.int64), decode_context_tokens_sum=sum(contexts))


@settings(deadline=None)
@given(points=st.lists(st.floats(-10, 10_000), min_size=1, max_size=40))
def test_a_curve_gives_many_points_as_it_gives_one(points: list[float]) -> None:
    curve = Curve((0.0, 1.0, 7.5, 1000.0), (3.0, 1.0, 2.0, 9.0))
    assert curve.at_all(np.array(points)).tolist() == [curve.at(point) for point in points]


def test_a_curve_meets_its_points_stays_below_and_goes_on_beyond() -> None:
    curve = Curve((1.0, 2.0, 4.0), (10.0, 20.0, 30.0))
    assert [curve.at(point) for point in (1, 1.5, 2, 3, 4)] == [10, 15, 20, 25, 30]
    assert curve.at(0) == 10
    assert curve.at(6) == 40


@settings(deadline=None)
@given(requests=st.floats(1, 400), context=st.floats(0, 9000))
def test_a_grid_of_a_multilinear_function_is_that_function(requests: float, context: float) -> None:
    grid = TABLES.attention.decode
    assert grid.at(requests, context) == pytest.approx(decode_ms(requests, context))
    assert grid.row(requests).at(context) == pytest.approx(decode_ms(requests, context))


def test_tables_with_holes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 points of a grid were not measured"):
        Grid.from_points(((0.0, 1.0), (0.0, 1.0)), {(0.0, 0.0): 1.0, (0.0, 1.0): 1.0, (1.0, 0.0): 1.0})
    with pytest.raises(ConfigurationError, match="must increase"):
        Curve((1.0, 1.0), (2.0, 2.0))


def test_a_step_is_the_sum_of_its_operators() -> None:
    cost = TableCost(TABLES)
    batch = decode([1000] * 128)
    assert cost.step_ms(batch) == pytest.approx(0.01 + TABLES.sequence.at(128) + LAYERS * (0.2 + decode_ms(128, 1000)))
    mixed = BatchShape((PrefillChunk(1024, 32), PrefillChunk(16, 0)), batch.decode_context_tokens, 128_000)
    attention_ms = decode_ms(128, 1000) + prefill_ms(1024, 32) + prefill_ms(16, 0) - prefill_ms(0, 0)
    assert cost.step_ms(mixed) == pytest.approx(
        0.01 + TABLES.sequence.at(130) + LAYERS * (TABLES.layer.at(128 + 1040) + attention_ms)
    )


@settings(deadline=None)
@given(contexts=st.lists(st.integers(1, 20_000), min_size=1, max_size=200), steps=st.integers(1, 60))
def test_a_run_costs_its_steps_to_the_last_bit(contexts: list[int], steps: int) -> None:
    shape = decode(contexts)
    for cost in (TableCost(TABLES), TableCost(TABLES, UNEVEN, graph_tokens=256)):
        one_by_one = [cost.step_ms(shape.decode_only_after(step)) for step in range(steps)]
        assert cost.decode_run_ms(shape, steps).tolist() == one_by_one


def test_uneven_lengths_cost_more_than_the_table_says() -> None:
    plain, uneven = TableCost(TABLES), TableCost(TABLES, UNEVEN)
    mixed = decode([100] * 99 + [20_000])
    assert uneven.step_ms(mixed) > plain.step_ms(mixed)
    assert uneven.step_ms(decode([1000] * 100)) == pytest.approx(plain.step_ms(decode([1000] * 100)))


@pytest.mark.parametrize(("tokens", "padded"), [(1, 1), (3, 4), (5, 8), (9, 16), (250, 256), (257, 257)])
def test_small_steps_run_as_the_next_larger_graph(tokens: int, padded: int) -> None:
    cost, exact = TableCost(TABLES, graph_tokens=256), TableCost(TABLES)
    chunk = BatchShape((PrefillChunk(tokens, 0),))
    extra = LAYERS * (TABLES.layer.at(padded) - TABLES.layer.at(tokens))
    assert cost.step_ms(chunk) == pytest.approx(exact.step_ms(chunk) + extra)


def test_a_ring_carries_everything_twice_but_for_its_own_share() -> None:
    links = Links(devices=4, latency_ms=0.5, bytes_per_ms=1000.0)
    assert links.all_reduce_ms(4000.0) == pytest.approx(6 * 0.5 + 1.5 * 4.0)
    assert links.gather_ms(4000.0) == pytest.approx(3 * 0.5 + 0.75 * 4.0)


def test_engines_that_share_experts_wait_for_the_slowest() -> None:
    grid = Grid.from_points(((1.0, 1000.0), (1.0, 8.0)), {(t, e): 0.01 * e for t in (1.0, 1000.0) for e in (1.0, 8.0)})
    experts = ExpertTables(grid, Experts(count=8, active=2, intermediate_size=1), 64, Links(2, 0.1, 1e6))
    tables = OperatorTables(LAYERS, 64, TABLES.layer, TABLES.step, TABLES.sequence, TABLES.attention, experts=experts)
    cost = TableCost(tables, graph_tokens=256)
    small, large = decode([10] * 2), decode([4000] * 100)
    alone_ms = cost.lockstep_ms([large, None])
    assert cost.lockstep_ms([small, large]) >= alone_ms
    assert cost.lockstep_ms([small, None]) < alone_ms
