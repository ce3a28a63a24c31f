"""The pieces of LMetric's reproduction, on values made by hand."""

import pytest

from controlplane.policies.registry import create_policy
from simulator.report.outcome import RequestOutcome
from simulator.reproductions.lmetric import setup
from simulator.reproductions.lmetric.experiment import WINDOW_S, contenders, prefill_imbalance
from simulator.reproductions.lmetric.hotspot import FIRST_PREFILL_S, HOT_SHARE, WARM_UP_S, hotspot_requests
from simulator.reproductions.lmetric.rows import gain_percent


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


@pytest.mark.parametrize("model", [setup.CHAT_MODEL, setup.API_MODEL])
def test_every_contender_is_a_policy_with_parameters_in_bounds(model: str) -> None:
    for contender in contenders(model).values():
        create_policy(contender.policy, contender.parameters)


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
