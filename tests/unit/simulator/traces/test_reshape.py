import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.traces.block_runs import BlockRuns
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import (
    clip,
    fit_context,
    scale_lengths,
    scale_rate,
    share_prefixes,
    spread_arrivals,
    superpose,
)


def test_clip_counts_anew_from_its_start_and_leaves_out_its_end() -> None:
    trace = [TraceRequest(second, 1, 1) for second in (0.0, 1.0, 2.5, 4.0)]
    assert [request.arrival_s for request in clip(trace, 1.0, 4.0)] == [0.0, 1.5]


def test_scaling_the_rate_by_two_halves_every_gap() -> None:
    trace = [TraceRequest(second, 1, 1) for second in (0.0, 1.0, 4.0)]
    assert [request.arrival_s for request in scale_rate(trace, 2.0)] == [0.0, 0.5, 2.0]


def test_scaled_lengths_keep_at_least_a_token_and_the_shared_share() -> None:
    (scaled,) = scale_lengths([TraceRequest(0.0, 1024, 2, (7, 8), 512)], 0.1)
    assert scaled == TraceRequest(0.0, 102, 1, (7, 8), 51)


def test_spreading_stays_within_the_grid_and_in_order() -> None:
    # 2999 ms and 3001 ms are both the grid's point at 3 s: published arrivals miss it by a few ms.
    seconds = [0.0, 0.0, 0.001, 2.999, 3.0, 3.001, 9.0]
    trace = [TraceRequest(second, 1, 1) for second in seconds]
    spread = [r.arrival_s for r in spread_arrivals(trace, 3.0, np.random.default_rng(1))]
    assert spread == sorted(spread)
    assert [int(second // 3) for second in spread] == [0, 0, 0, 1, 1, 1, 3]
    assert len(set(spread)) == len(spread)


def test_shared_prefixes_are_shared_seeded_and_only_given_to_requests_without() -> None:
    trace = [TraceRequest(0.0, 100, 1) for _ in range(50)] + [TraceRequest(0.0, 100, 1, (5,), 512)]

    def shared(seed: int) -> list[TraceRequest]:
        return list(share_prefixes(trace, 0.5, 4, np.random.default_rng(seed)))

    first = shared(1)
    assert first == shared(1) != shared(2)
    assert first[-1] is trace[-1]
    groups = {request.prefix_block_ids for request in first[:-1]}
    assert 2 <= len(groups) <= 4
    assert all(len(group) == 3 for group in groups)
    (plain,) = share_prefixes([TraceRequest(0.0, 10, 1)], 0.5, 4, np.random.default_rng(1))
    assert plain.prefix_block_ids == ()


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(2, 10**5))
def test_every_request_fits_its_context(input_tokens: int, output_tokens: int, max_tokens: int) -> None:
    request = TraceRequest(0.0, input_tokens, output_tokens)
    fitted = fit_context(request, max_tokens)
    assert fitted.total_tokens <= max_tokens
    assert (fitted is request) == (request.total_tokens <= max_tokens)
    if fitted is not request:
        assert fitted.total_tokens == max_tokens


def test_a_shortened_request_keeps_its_proportion() -> None:
    assert fit_context(TraceRequest(0.0, 3000, 1000), 1000) == TraceRequest(0.0, 750, 250)


def test_no_context_holds_less_than_two_tokens() -> None:
    with pytest.raises(ValueError, match="at least a prompt token"):
        fit_context(TraceRequest(0.0, 1, 1), 1)


def test_superposed_copies_keep_lengths_and_span_and_share_nothing() -> None:
    trace = [
        TraceRequest(0.0, 32, 5, (1, 2), 16, session_id="a"),
        TraceRequest(1.0, 48, 6, BlockRuns([(1, 3)]), 16, session_id="a", think_s=0.5),
        TraceRequest(10.0, 8, 7),
    ]
    superposed = list(superpose(trace, 3, np.random.default_rng(2)))
    assert len(superposed) == 9
    times_s = [request.arrival_s for request in superposed]
    assert times_s == sorted(times_s)
    assert times_s[-1] <= 10.0
    assert sorted(request.total_tokens for request in superposed) == sorted([37, 54, 15] * 3)
    first_names = [request.prefix_block_ids[0] for request in superposed if request.prefix_block_ids]
    assert len(set(first_names)) == 3
    sessions = [request.session_id for request in superposed if request.session_id]
    assert sorted(map(sessions.count, set(sessions))) == [2, 2, 2]
    assert superposed == list(superpose(trace, 3, np.random.default_rng(2)))
    assert list(superpose(trace, 1, np.random.default_rng(2))) == trace
