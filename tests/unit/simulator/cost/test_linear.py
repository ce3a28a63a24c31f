"""The linear cost model: what it counts, and that runs cost what their steps cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cost.linear import LinearCost
from simulator.cost.model import BatchShape, CostModel, PrefillChunk


def decode(contexts: list[int]) -> BatchShape:
    return BatchShape(decode_context_tokens=np.array(contexts, dtype=np.int64), decode_context_tokens_sum=sum(contexts))


def test_each_kind_of_work_counts() -> None:
    cost = LinearCost(
        fixed_ms=1.0, prefill_token_ms=0.5, decode_request_ms=0.25, context_token_ms=0.01, attended_pair_ms=0.001
    )
    shape = BatchShape((PrefillChunk(10, 100),), np.array([30, 40]), 70)
    # Each of the 10 new tokens attends to 100 before the chunk and, on average, to 5.5 within it.
    assert cost.step_ms(shape) == pytest.approx(1.0 + 5.0 + 0.5 + 0.7 + 1.055)


def test_chunks_cost_what_the_prompt_costs_but_for_the_fixed_part() -> None:
    cost = LinearCost(fixed_ms=0.0)
    whole = cost.step_ms(BatchShape((PrefillChunk(1000, 0),)))
    parts = cost.step_ms(BatchShape((PrefillChunk(400, 0),))) + cost.step_ms(BatchShape((PrefillChunk(600, 400),)))
    assert parts == pytest.approx(whole)


@given(contexts=st.lists(st.integers(1, 200_000), min_size=1, max_size=300), steps=st.integers(1, 40))
def test_a_run_costs_its_steps_to_the_last_bit(contexts: list[int], steps: int) -> None:
    cost = LinearCost()
    shape = decode(contexts)
    one_by_one = [cost.step_ms(shape.decode_only_after(step)) for step in range(steps)]
    assert cost.decode_run_ms(shape, steps).tolist() == one_by_one
    assert CostModel.decode_run_ms(cost, shape, steps).tolist() == one_by_one
