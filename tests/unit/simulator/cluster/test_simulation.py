"""The cluster simulator against hand-computed cases, and against itself."""

from dataclasses import replace
from itertools import pairwise

import pytest

import controlplane.policies.place
import engine_worker.engines.simulated
import simulator.cluster.placements
import simulator.cluster.worker
from controlplane.model.cluster import ClusterTable
from controlplane.model.prefix_index import PrefixIndex
from controlplane.policies.registry import create_policy
from controlplane.protocols.recovery import RecoveryLimits
from controlplane.scheduler import feed, placement_service
from mesh.errors import ConfigurationError
from simulator.cluster.config import ClusterConfig, Failure, KvReuseConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.report.outcome import RequestOutcome
from simulator.report.report import Slo, encode_report, summarise
from simulator.traces.request import TraceRequest
from simulator.traces.source import TraceRecipe, open_trace

SMALL = InstanceConfig(
    block_tokens=16, kv_blocks=64, max_model_len_tokens=1024, max_batch_requests=4, max_step_tokens=100
)
PER_TOKEN = LinearCost(
    fixed_ms=10.0, prefill_token_ms=1.0, decode_request_ms=2.0, context_token_ms=0.0, attended_pair_ms=0.0
)
CROWDED = replace(SMALL, kv_blocks=600, max_model_len_tokens=8192, max_batch_requests=16, max_step_tokens=512)


def simulate(
    requests: list[TraceRequest], config: ClusterConfig, cost: LinearCost = PER_TOKEN, policy: str = "lmetric"
) -> list[RequestOutcome]:
    return ClusterSimulation(requests, config, cost, create_policy(policy)).run()


def conversations(seconds: float = 60.0, seed: int = 1) -> list[TraceRequest]:
    return list(open_trace(TraceRecipe("synthetic", seed=seed, clip_end_s=seconds, rate_scale=8.0)))


def test_there_is_no_second_copy_of_the_live_objects() -> None:
    simulation = ClusterSimulation([], ClusterConfig(2, SMALL), PER_TOKEN, create_policy("lmetric"))
    assert simulator.cluster.placements.place is controlplane.policies.place.place is placement_service.place  # type: ignore[attr-defined]
    assert type(simulation.table) is ClusterTable is feed.ClusterTable  # type: ignore[attr-defined]
    assert type(simulation.table.index) is PrefixIndex
    engines_instance = engine_worker.engines.simulated.SimulatedInstance  # type: ignore[attr-defined]
    assert all(type(worker.instance) is engines_instance for worker in simulation.workers.values())


def test_one_request_by_hand() -> None:
    (outcome,) = simulate([TraceRequest(1.0, 50, 3)], ClusterConfig(1, SMALL))
    assert outcome.first_token_s == pytest.approx(1.060)  # 10 + 50 x 1
    assert outcome.finished_s == outcome.last_token_s == pytest.approx(1.084)  # two steps of 10 + 1 x 2
    assert outcome.ttft_ms == pytest.approx(60.0)
    assert outcome.tpot_ms == pytest.approx(12.0)
    assert (outcome.input_tokens, outcome.output_tokens, outcome.instance_id) == (50, 3, "instance-0")


def test_two_requests_on_one_instance_by_hand() -> None:
    requests = [TraceRequest(0.0, 50, 3), TraceRequest(0.030, 40, 2)]
    first, second = simulate(requests, ClusterConfig(1, SMALL))
    # 0..60 prefill of the first; 60..112 its decode (10 + 2) beside the second's prefill (40); 112..126 both decode.
    assert first.first_token_s == pytest.approx(0.060)
    assert second.first_token_s == pytest.approx(0.112)
    assert first.finished_s == second.finished_s == pytest.approx(0.126)


def test_two_requests_on_two_instances_do_not_meet() -> None:
    requests = [TraceRequest(0.0, 50, 3), TraceRequest(0.030, 40, 2)]
    first, second = simulate(requests, ClusterConfig(2, SMALL))
    assert {first.instance_id, second.instance_id} == {"instance-0", "instance-1"}
    assert first.finished_s == pytest.approx(0.084)
    assert second.finished_s == pytest.approx(0.030 + 0.050 + 0.012)


def test_a_shared_prefix_is_found_where_it_was_computed() -> None:
    names = (7, 8, 9)
    requests = [TraceRequest(float(at_s), 48, 2, names, 16) for at_s in range(4)]
    outcomes = simulate(requests, ClusterConfig(3, SMALL))
    # Two blocks of three: the last token is always computed.
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 32, 32, 32]
    assert len({outcome.instance_id for outcome in outcomes}) == 1


def test_an_old_load_report_misleads() -> None:
    """A burst that ended is believed to last while the news are under way."""
    requests = [TraceRequest(0.0, 90, 30), TraceRequest(7.0, 90, 1)]
    instances = {}
    for delay_ms in (0.0, 60_000.0):
        simulation = ClusterSimulation(
            requests, ClusterConfig(2, SMALL, report_delay_ms=delay_ms), PER_TOKEN, create_policy("lmetric")
        )
        simulation.run()
        loads = [simulation.table.load(name).prefilled_tokens_total for name in ("instance-0", "instance-1")]
        instances[delay_ms] = sorted(loads)
    assert instances[0.0] == [0, 90]
    assert instances[60_000.0] == [0, 0]


@pytest.mark.parametrize("policy", ["lmetric", "round_robin", "least_loaded"])
def test_every_request_ends_once(policy: str) -> None:
    requests = conversations()
    outcomes = simulate(requests, ClusterConfig(3, CROWDED), LinearCost(), policy)
    assert len(outcomes) == len(requests) > 50
    for request, outcome in zip(requests, outcomes, strict=True):
        assert not outcome.error
        assert (outcome.arrival_s, outcome.input_tokens) == (request.arrival_s, request.input_tokens)
        assert outcome.first_token_s is not None
        assert outcome.arrival_s < outcome.first_token_s <= outcome.finished_s


@pytest.mark.slow
@pytest.mark.parametrize("interval_ms", [0.0, 7.0, 50.0])
@pytest.mark.parametrize("failures", [(), (Failure(1, 3.0, 1.5), Failure(0, 4.1))])
def test_skipping_steps_changes_nothing(interval_ms: float, failures: tuple[Failure, ...]) -> None:
    config = ClusterConfig(3, CROWDED, report_interval_ms=interval_ms, report_delay_ms=3.0, failures=failures)
    requests = conversations()
    fast = simulate(requests, config, LinearCost())
    assert fast == simulate(requests, replace(config, skip_steps=False), LinearCost())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report_byte_for_byte() -> None:
    config = ClusterConfig(3, CROWDED, seed=5)
    reports = [
        encode_report(summarise(simulate(conversations(), config, LinearCost()), Slo(), policy="lmetric", seed=5))
        for _ in range(2)
    ]
    assert reports[0] == reports[1]
    other = simulate(conversations(), replace(config, seed=6), LinearCost())
    assert encode_report(summarise(other, Slo(), policy="lmetric", seed=5)) != reports[0]


def test_requests_of_a_dead_instance_go_on_elsewhere() -> None:
    requests = [TraceRequest(0.0, 50, 40)]
    (undisturbed,) = simulate(requests, ClusterConfig(2, SMALL))
    assert undisturbed.finished_s == pytest.approx(0.060 + 39 * 0.012)
    used = int(undisturbed.instance_id[-1])
    (outcome,) = simulate(requests, ClusterConfig(2, SMALL, failures=(Failure(used, 0.100),)))
    # Three decode steps are done by 96 ms; prompt and 4 tokens are prefilled from 100 ms on, and 35 are left.
    assert outcome.first_token_s == pytest.approx(0.060)
    assert outcome.finished_s == pytest.approx(0.100 + 0.064 + 35 * 0.012)
    assert outcome.instance_id == f"instance-{1 - used}"
    assert (outcome.output_tokens, outcome.error) == (40, "")


def test_requests_fail_where_no_instance_is_left_for_as_long_as_they_wait() -> None:
    failures = (Failure(0, 0.100), Failure(1, 0.100))
    (outcome,) = simulate([TraceRequest(0.0, 50, 40)], ClusterConfig(2, SMALL, failures=failures))
    assert "has gone" in outcome.error
    assert outcome.finished_s == pytest.approx(0.100 + 30.0)


def test_a_request_waits_for_an_instance_that_comes_back() -> None:
    requests = [TraceRequest(0.0, 50, 40), TraceRequest(1.0, 50, 3)]
    lost, new = simulate(requests, ClusterConfig(1, SMALL, failures=(Failure(0, 0.100, 20.0),)))
    assert not lost.error
    assert not new.error
    # A step of 100 tokens, all 54 of the first and 46 of the other; then the last 4 beside the first's decode.
    assert new.first_token_s == pytest.approx(20.100 + 0.110 + 0.016)


def test_a_request_that_finds_every_queue_full_asks_again() -> None:
    narrow = replace(SMALL, max_batch_requests=1, max_queued_requests=1)
    outcomes = simulate([TraceRequest(0.0, 50, 40)] * 8, ClusterConfig(2, narrow))
    assert not any(outcome.error for outcome in outcomes)
    impatient = ClusterConfig(2, narrow, recovery=RecoveryLimits(max_losses=2, wait_s=0.0))
    errors = [outcome.error for outcome in simulate([TraceRequest(0.0, 50, 40)] * 8, impatient)]
    assert len([error for error in errors if "max_queued_requests" in error]) == 5


def test_a_returning_instance_serves_again_with_an_empty_cache() -> None:
    requests = [TraceRequest(at_s, 48, 2, (7, 8, 9), 16) for at_s in (0.0, 1.0, 3.0, 4.0)]
    outcomes = simulate(requests, ClusterConfig(1, SMALL, failures=(Failure(0, 2.0, 0.5),)))
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 32, 0, 32]


def test_without_instances_requests_fail_and_are_counted() -> None:
    requests = [TraceRequest(0.0, 10, 1), TraceRequest(5.0, 10, 1)]
    first, second = simulate(requests, ClusterConfig(1, SMALL, failures=(Failure(0, 1.0),)))
    assert not first.error
    assert second.error
    assert second.finished_s == 5.0 + 30.0


def test_a_request_beyond_the_context_is_refused() -> None:
    (outcome,) = simulate([TraceRequest(0.0, 1024, 1)], ClusterConfig(1, SMALL))
    assert "context length" in outcome.error


def test_progress_never_falls_and_reaches_the_end() -> None:
    heard: list[int] = []
    requests = conversations()
    ClusterSimulation(requests, ClusterConfig(2, CROWDED), LinearCost(), create_policy("lmetric")).run(heard.append)
    assert all(before <= after for before, after in pairwise(heard))
    assert heard[-1] == len(requests)


@pytest.mark.parametrize("failures", [(Failure(2, 1.0),), (Failure(0, 1.0), Failure(0, 2.0))])
def test_impossible_failures_are_refused(failures: tuple[Failure, ...]) -> None:
    with pytest.raises(ConfigurationError):
        ClusterConfig(2, SMALL, failures=failures)


@pytest.mark.parametrize("reuse", [KvReuseConfig(), KvReuseConfig(pulls=True, host_factor=2.0, host_instances=2)])
def test_a_long_prompt_does_not_wait_for_those_that_come_after_it(reuse: KvReuseConfig) -> None:
    """Nothing in the mesh keeps placed prompts back but their instance's queue, which is first come, first served: a
    flood of short prompts cannot starve a long one, so there is nothing to age. Its last chunk shares a step."""
    instance = InstanceConfig(kv_blocks=600, max_model_len_tokens=8192, max_queued_requests=10_000)
    config = ClusterConfig(2, instance, kv_reuse=reuse)
    flood = [TraceRequest(0.01 * number, 200, 20, (number % 40,), 64) for number in range(900)]
    long_prompt = TraceRequest(3.001, 6000, 2)
    at = next(number for number, request in enumerate(flood) if request.arrival_s > long_prompt.arrival_s)
    cost = LinearCost(fixed_ms=40.0, prefill_token_ms=0.6)
    alone, in_flood = (
        simulate([*flood[:at], long_prompt, *later], config, cost, "penstock") for later in ([], flood[at:])
    )
    full_step_ms = 40.0 + 2048 * 0.6
    ttft_ms = in_flood[at].ttft_ms or 0.0
    assert 0 < ttft_ms <= (alone[at].ttft_ms or 0.0) + full_step_ms
    assert (in_flood[-1].ttft_ms or 0.0) > ttft_ms, "it was a flood: who came later waited longer"
