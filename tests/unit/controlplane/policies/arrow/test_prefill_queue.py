import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.arrow.prefill_queue import MAX_ENTRIES, PrefillQueue
from controlplane.prediction.ttft import TtftCurve

CURVE = TtftCurve(5.0, 0.1, 1e-5)
PROMPTS = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), max_size=20)


@given(PROMPTS)
def test_all_that_waits_counts_with_its_predicted_time(prompts: list[tuple[int, int]]) -> None:
    queue = PrefillQueue(CURVE)
    for new, cached in prompts:
        queue.add(new, cached)
    expected = sum(CURVE.prefill_ms(new, cached) for new, cached in prompts)
    assert queue.delay_ms(sum(new for new, _ in prompts)) == pytest.approx(expected)


@given(PROMPTS, st.lists(st.floats(0, 1), max_size=10))
def test_what_has_run_is_taken_off_from_the_front(prompts: list[tuple[int, int]], shares: list[float]) -> None:
    queue = PrefillQueue(CURVE)
    for new, cached in prompts:
        queue.add(new, cached)
    pending = sum(new for new, _ in prompts)
    last_ms = queue.delay_ms(pending)
    for share in shares:
        pending = int(pending * share)
        delay_ms = queue.delay_ms(pending)
        queue.validate()
        assert 0 <= delay_ms <= last_ms + 1e-6
        last_ms = delay_ms
    assert queue.delay_ms(0) == 0
    assert len(queue) == 0


def test_a_half_computed_prompt_counts_by_the_half_that_is_left() -> None:
    queue = PrefillQueue(CURVE)
    queue.add(1000, 0)
    queue.add(200, 50)
    left = CURVE.prefill_ms(1000) - CURVE.part_ms(600, 0) + CURVE.prefill_ms(200, 50)
    assert queue.delay_ms(600) == pytest.approx(left)
    assert queue.delay_ms(200) == pytest.approx(CURVE.prefill_ms(200, 50))


def test_tokens_that_someone_else_placed_count_too() -> None:
    queue = PrefillQueue(CURVE)
    assert queue.delay_ms(300) == CURVE.prefill_ms(300)
    queue.add(100, 0)
    assert queue.delay_ms(400) == pytest.approx(CURVE.prefill_ms(100) + CURVE.prefill_ms(300))


def test_the_memory_is_bounded() -> None:
    queue = PrefillQueue(CURVE)
    for _ in range(MAX_ENTRIES + 10):
        queue.add(1, 0)
    assert len(queue) == MAX_ENTRIES
    queue.validate()
