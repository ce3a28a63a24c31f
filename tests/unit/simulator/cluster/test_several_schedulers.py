"""Schedulers that hear of each other's placements late, and instances that give requests back."""

from statistics import fmean

import numpy as np
import pytest

from controlplane.model.queue_belief import PresentLoad
from controlplane.policies.registry import create_policy
from controlplane.protocols.bouncing import MAX_BOUNCES
from mesh.errors import ConfigurationError
from simulator.cluster.config import ClusterConfig, Failure, SchedulersConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

SLACK_TOKENS = 256


def requests(count: int = 600, seed: int = 1) -> list[TraceRequest]:
    """About half of what eight instances can do, so that a wrong choice shows."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(0.012, count)).tolist()
    prompts = rng.integers(50, 1500, count).tolist()
    return [TraceRequest(arrival_s, tokens, 4) for arrival_s, tokens in zip(arrivals_s, prompts, strict=True)]


def run(schedulers: SchedulersConfig, policy: str = "lmetric_plus", **about: object) -> ClusterSimulation:
    config = ClusterConfig(8, InstanceConfig(max_model_len_tokens=2048), schedulers=schedulers, **about)  # type: ignore[arg-type]
    simulation = ClusterSimulation(requests(), config, LinearCost(), create_policy(policy))
    simulation.run()
    return simulation


def outcomes_of(simulation: ClusterSimulation) -> list[RequestOutcome]:
    outcomes = simulation.ledger.outcomes()
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert len(outcomes) == 600
    for table in simulation.fleet.tables:
        table.validate()
    simulation.placements.validate()
    return outcomes


def mean_ttft_s(simulation: ClusterSimulation) -> float:
    outcomes = outcomes_of(simulation)
    return fmean((outcome.first_token_s or 0.0) - outcome.arrival_s for outcome in outcomes)


@pytest.mark.parametrize("policy", ["lmetric_plus", "penstock"])
def test_schedulers_that_hear_of_each_other_at_once_are_as_good_as_one(policy: str) -> None:
    """Not the same to the last digit: each breaks ties in its own turn."""
    alone, several = (mean_ttft_s(run(each, policy)) for each in (SchedulersConfig(), SchedulersConfig(5, share_ms=0)))
    assert several == pytest.approx(alone, rel=0.1)


def test_one_scheduler_that_knows_all_gets_nothing_back() -> None:
    alone = run(SchedulersConfig())
    strict = run(SchedulersConfig(bounce_tokens=1))
    assert strict.placements.bounces == 0
    assert outcomes_of(strict) == outcomes_of(alone)
    assert not strict.table.expected_requests(), "what has ended counts nowhere"


def test_late_news_cost_time_and_bounces_win_most_of_it_back() -> None:
    alone, deaf = mean_ttft_s(run(SchedulersConfig())), mean_ttft_s(run(SchedulersConfig(8, share_ms=None)))
    bouncing = run(SchedulersConfig(8, share_ms=None, bounce_tokens=SLACK_TOKENS))
    assert deaf > 1.2 * alone
    assert mean_ttft_s(bouncing) - alone < 0.6 * (deaf - alone)
    assert 0 < bouncing.placements.bounces <= MAX_BOUNCES * 600


def test_an_instance_that_dies_takes_no_bounced_request_with_it() -> None:
    schedulers = SchedulersConfig(4, share_ms=20.0, bounce_tokens=64)
    failures = (Failure(2, at_s=2.0, back_after_s=1.5), Failure(5, at_s=3.0))
    simulation = run(schedulers, failures=failures)
    assert simulation.placements.bounces
    assert {outcome.error for outcome in outcomes_of(simulation)} == {""}


def test_an_instance_counts_what_placements_believed_or_less() -> None:
    simulation = run(SchedulersConfig())
    for worker in simulation.workers.values():
        assert worker.present_load(simulation.events.now_ms) == PresentLoad(0, 0)


def test_impossible_schedulers_are_refused() -> None:
    for wrong in ({"count": 0}, {"share_ms": -1.0}, {"bounce_tokens": -1}):
        with pytest.raises(ConfigurationError, match="schedulers need"):
            SchedulersConfig(**wrong)  # type: ignore[arg-type]
