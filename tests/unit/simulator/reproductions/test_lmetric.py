"""The pieces of LMetric's reproduction, on values made by hand."""

from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest

from controlplane.policies.registry import create_policy
from simulator.report.outcome import RequestOutcome
from simulator.report.report import Slo, summarise
from simulator.reproductions.lmetric import setup
from simulator.reproductions.lmetric.experiment import (
    FINDERS,
    HALF,
    WINDOW_S,
    Placed,
    contenders,
    over_seeds,
    prefill_imbalance,
)
from simulator.reproductions.lmetric.hotspot import FIRST_PREFILL_S, HOT_SHARE, WARM_UP_S, hotspot_requests
from simulator.reproductions.lmetric.rows import gain_percent, queueing_share, ttft_gain
from simulator.traces.source import SYNTHETIC
from simulator.traces.synthetic import synthetic_trace


def outcome(instance: str, first_token_s: float, tokens: int, cached: int = 0, error: str = "") -> RequestOutcome:
    return RequestOutcome(
        arrival_s=0.0,
        finished_s=first_token_s,
        first_token_s=first_token_s,
        input_tokens=tokens,
        cached_tokens=cached,
        instance_id=instance,
        error=error,
    )


def test_imbalance_is_the_mean_gap_of_computed_tokens_over_windows() -> None:
    outcomes = [
        outcome("a", 1.0, 1000),
        outcome("b", 2.0, 600, cached=200),
        outcome("b", WINDOW_S + 1, 300),
        outcome("a", WINDOW_S + 2, 5000, error="gone"),
    ]
    assert prefill_imbalance(outcomes, instances=2) == pytest.approx((600 + 300) / 2)
    # A third instance that got nothing makes the gap as large as what was served most.
    assert prefill_imbalance(outcomes, instances=3) == pytest.approx((1000 + 300) / 2)
    assert prefill_imbalance([], instances=3) == 0.0


def test_gains_are_relative_to_the_rival() -> None:
    assert gain_percent(8.0, 100.0) == pytest.approx(92.0)
    assert gain_percent(110.0, 100.0) == pytest.approx(-10.0)
    assert gain_percent(None, 100.0) is None
    assert gain_percent(1.0, 0.0) is None


@pytest.mark.parametrize("load", setup.LOADS, ids=lambda load: load.name)
@pytest.mark.parametrize("quick", [False, True])
def test_every_contender_is_a_policy_with_parameters_in_bounds(load: setup.Load, quick: bool) -> None:
    everyone = contenders(setup.Replay(load, load.trace, quick))
    for contender in everyone.values():
        create_policy(contender.policy, contender.parameters)
    assert everyone.keys() >= set(FINDERS)
    assert HALF in load.shares


CHAT_REPLAY = setup.Replay(setup.LOADS[0], SYNTHETIC, quick=True)


def test_the_conversations_are_as_long_and_as_alike_as_the_papers() -> None:
    """2.3k tokens a prompt, 62 % of them known to an infinite cache."""
    requests, warm = CHAT_REPLAY.requests(0.1, 3)
    assert requests == CHAT_REPLAY.requests(0.1, 3)[0]
    assert all((request.arrival_s < CHAT_REPLAY.warm_s) == (place < warm) for place, request in enumerate(requests))
    long_after = replace(setup.CONVERSATIONS, duration_s=600.0, request_rate_per_s=8.0)
    later = list(synthetic_trace(long_after, np.random.default_rng(0)))
    seen: set[int] = set()
    tokens = cached = 0
    for request in later:
        known = sum(1 for _ in takewhile(seen.__contains__, request.prefix_block_ids)) * request.block_tokens
        seen.update(request.prefix_block_ids)
        if request.arrival_s >= 90:
            tokens, cached = tokens + request.input_tokens, cached + known
    measured = [request.input_tokens for request in later if request.arrival_s >= 90]
    assert np.mean(measured) == pytest.approx(2300, rel=0.05)
    assert cached / tokens == pytest.approx(0.62, abs=0.04)


def placed(ttft_ms: float) -> Placed:
    """One request's worth of results."""
    ended = RequestOutcome(0.0, 1.0, first_token_s=ttft_ms / 1000, last_token_s=1.0, input_tokens=10, output_tokens=5)
    return Placed(summarise([ended], Slo(), policy=None, seed=0), 0.0, 1.0)


def test_a_figure_over_seeds_is_of_the_pairs_that_both_have() -> None:
    gain = over_seeds(ttft_gain, [placed(10), placed(30), placed(1)], [placed(100), placed(100)])
    assert gain.mean == pytest.approx(80)
    assert gain.half == pytest.approx(12.71 * 200**0.5 / 2**0.5)
    assert over_seeds(ttft_gain, [placed(10)], [placed(100)]).half == 0


def test_vllm_queues_from_where_its_ttft_has_grown_several_times() -> None:
    curve = {0.25: [placed(100)], 0.5: [placed(150)], 0.7: [placed(350)], 0.9: [placed(900)]}
    assert queueing_share({setup.VLLM: curve}) == 0.7
    assert queueing_share({setup.VLLM: {0.25: [placed(100)], 0.9: [placed(120)]}}) == 0.9


def test_the_tuned_simulation_predicts_steps_of_the_model_it_was_tuned_for() -> None:
    tuned, other = (setup.fitted_parameters(model) for model in (setup.CHAT_MODEL, setup.API_MODEL))
    assert all(value >= 0 for value in tuned.values())
    assert tuned != other
    assert tuned["prefill_token_ms"] > 0


def test_the_hotspot_is_a_class_of_its_share_and_the_same_for_a_seed() -> None:
    requests = hotspot_requests(3, 200.0)
    late = [request for request in requests if request.arrival_s > WARM_UP_S + FIRST_PREFILL_S]
    hot = [request for request in requests if request.prefix_block_ids]
    assert (len(hot) - 1) / len(late) == pytest.approx(HOT_SHARE, abs=0.05)
    assert len({request.prefix_block_ids for request in hot}) == 1
    assert hot[1].arrival_s - hot[0].arrival_s > FIRST_PREFILL_S - 1, "the first has cached the prefix by then"
    assert requests == hotspot_requests(3, 200.0)
