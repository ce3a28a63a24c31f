"""KV that simulated instances pull from each other and load from their hosts, by hand."""

from dataclasses import replace

import pytest

import engine_worker.prefix_pull.source
import engine_worker.prefix_pull.target
from controlplane.model.placement import PrefixPull
from controlplane.model.step_costs import StepCosts
from controlplane.policies.registry import create_policy
from controlplane.protocols.prefix_pull.target import PullOutcome
from simulator.cluster.config import ClusterConfig, Failure, KvLinkConfig, KvReuseConfig
from simulator.cluster.events import Rank
from simulator.cluster.prefix import prompt_block_hashes
from simulator.cluster.prefix_pull import puller
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.instance.counted_request import CountedRequest
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest
from simulator.traces.source import TraceRecipe, open_trace

SMALL = InstanceConfig(
    block_tokens=16,
    kv_blocks=64,
    max_model_len_tokens=1024,
    max_batch_requests=4,
    max_step_tokens=1024,
    block_bytes=16 << 20,
)
COST = LinearCost(
    fixed_ms=10.0, prefill_token_ms=1.0, decode_request_ms=2.0, context_token_ms=0.0, attended_pair_ms=0.0
)
LINK = KvLinkConfig(latency_ms=4.0, bandwidth_gib_per_s=10.0)
PROFILED = StepCosts(10.0, 1.0, 2.0, 0.0, 0.0)
PULLS = ClusterConfig(2, SMALL, link=LINK, kv_reuse=KvReuseConfig(pulls=True), profiled=PROFILED)
CALL_MS = 2 * 0.5
"""To ask the source, and to hear its answer."""
TRANSFER_MS = 4 + 512 / 10 / 1024 * 1000
"""Of 32 blocks of 16 MiB."""


def same(arrival_s: float, name: int = 0, tokens: int = 520) -> TraceRequest:
    """A prompt whose first 512 tokens are those of the others of the same name."""
    return TraceRequest(arrival_s, tokens, 2, tuple(range(100 * name, 100 * name + 32)), 16)


def simulate(
    requests: list[TraceRequest], config: ClusterConfig, policy: str = "round_robin"
) -> tuple[list[RequestOutcome], ClusterSimulation]:
    simulation = ClusterSimulation(requests, config, COST, create_policy(policy))
    outcomes = simulation.run()
    for worker in simulation.workers.values():
        worker.instance.validate()
        assert not worker.instance.request_ids, "nothing is held for anybody any more"
    simulation.pulls.validate()
    simulation.table.validate()
    return outcomes, simulation


def test_pulls_are_decided_by_the_managers_of_the_live_mesh() -> None:
    assert puller.PullManager is engine_worker.prefix_pull.target.PullManager
    assert puller.HoldManager is engine_worker.prefix_pull.source.HoldManager


def test_nothing_is_brought_unless_it_is_asked_for() -> None:
    (_, second), simulation = simulate([same(0.0), same(2.0)], replace(PULLS, kv_reuse=KvReuseConfig()))
    assert (second.cached_tokens, simulation.pulls.outcomes.total()) == (0, 0)


def test_a_prefix_is_pulled_and_the_rest_computed() -> None:
    (first, second), simulation = simulate([same(0.0), same(2.0)], PULLS)
    assert (first.instance_id, second.instance_id) == ("instance-0", "instance-1")
    assert second.cached_tokens == 512
    assert second.ttft_ms == pytest.approx(CALL_MS + TRANSFER_MS + 10 + 8)
    assert simulation.pulls.outcomes == {PullOutcome.PULLED: 1}
    assert simulation.pulls.pulled_tokens == 512
    assert simulation.links.moved_bytes == 32 << 24


def test_a_link_that_is_slower_than_computing_is_left_alone() -> None:
    slow = replace(PULLS, link=replace(LINK, bandwidth_gib_per_s=0.5))
    (_, second), simulation = simulate([same(0.0), same(2.0)], slow)
    assert (second.cached_tokens, simulation.pulls.outcomes.total()) == (0, 0)


def test_pulls_from_one_source_share_its_link_and_one_that_is_late_is_computed() -> None:
    requests = [same(0.0), *(same(3.0) for _ in range(4))]
    config = replace(PULLS, instances=5, link=replace(LINK, bandwidth_gib_per_s=1.2))
    outcomes, simulation = simulate(requests, config)
    assert simulation.pulls.outcomes[PullOutcome.LATE] > 0
    assert all(not each.error for each in outcomes)
    assert all(each.ttft_ms is not None and each.ttft_ms < 520 + 530 + 50 for each in outcomes)


def test_what_the_source_has_evicted_is_computed() -> None:
    """The scheduler learns of it only with the next report."""
    requests = [same(0.0), same(2.0, 1), same(4.0, 2), same(4.01, 3), same(4.62, 0)]
    outcomes, simulation = simulate(requests, replace(PULLS, report_interval_ms=60_000.0))
    assert all(not each.error for each in outcomes)
    simulation.placements.validate()


@pytest.mark.parametrize("dies", [0, 1])
def test_a_source_or_target_that_dies_under_a_pull_costs_only_the_pull(dies: int) -> None:
    config = replace(PULLS, instances=3, failures=(Failure(dies, 2.01),))
    (_, second), simulation = simulate([same(0.0), same(2.0)], config)
    assert not second.error
    assert second.cached_tokens == (0 if dies == 0 else 512)
    assert second.instance_id != f"instance-{dies}"
    assert simulation.links.waiting_transfers() == 0


def test_the_host_keeps_what_its_instances_evict() -> None:
    reuse = KvReuseConfig(host_factor=4.0, host_instances=1, load_latency_ms=1.0, load_gib_per_s=5.0)
    requests = [same(0.0), same(2.0, 1), same(4.0, 2), same(6.0)]
    config = replace(PULLS, instances=1, kv_reuse=reuse)
    outcomes, simulation = simulate(requests, config)
    assert outcomes[3].cached_tokens == 512
    assert outcomes[3].ttft_ms == pytest.approx(1 + 512 / 5 / 1024 * 1000 + 10 + 8)
    assert (simulation.loads.loads, simulation.loads.loaded_tokens) == (1, 512)
    small = replace(config, kv_reuse=replace(reuse, host_factor=1.0))
    outcomes, simulation = simulate(requests, small)
    assert outcomes[3].cached_tokens == 0, "the host has forgotten it, too"


def test_a_host_is_shared_by_its_instances_only() -> None:
    reuse = KvReuseConfig(host_factor=1.0, host_instances=2)
    requests = [same(0.0), same(2.0), same(4.0)]
    outcomes, _ = simulate(requests, replace(PULLS, instances=3, kv_reuse=reuse))
    assert [each.cached_tokens for each in outcomes] == [0, 512, 0]


@pytest.mark.parametrize("dies", [False, True])
def test_what_only_the_host_of_another_instance_has_is_loaded_there_and_pulled(dies: bool) -> None:
    """Computed by the first instance, which then computed two others and has no room for it any more."""
    reuse = KvReuseConfig(True, host_factor=4.0, host_instances=1, load_latency_ms=1.0, load_gib_per_s=5.0)
    requests = [same(0.0), same(1.0, 9), same(2.0, 1), same(3.0, 9), same(4.0, 2), same(6.0)]
    failures = (Failure(0, 6.05),) if dies else ()
    outcomes, simulation = simulate(requests, replace(PULLS, kv_reuse=reuse, failures=failures))
    last = outcomes[5]
    assert (outcomes[0].instance_id, outcomes[4].instance_id, last.instance_id) == (*2 * ("instance-0",), "instance-1")
    assert not last.error
    if dies:
        assert (last.cached_tokens, simulation.pulls.outcomes[PullOutcome.FAILED]) == (0, 1)
        return
    assert last.cached_tokens == 512
    assert last.ttft_ms == pytest.approx(CALL_MS + 1 + 512 / 5 / 1024 * 1000 + TRANSFER_MS + 10 + 8)
    assert simulation.pulls.outcomes == {PullOutcome.PULLED: 1}
    assert (simulation.loads.loads, simulation.loads.loaded_tokens) == (1, 512)


@pytest.mark.parametrize("reuse", [KvReuseConfig(True), KvReuseConfig(False, 4.0, 2), KvReuseConfig(True, 4.0, 2)])
def test_a_busy_mesh_keeps_its_books_and_gains_by_host_memory(reuse: KvReuseConfig) -> None:
    """Pulls alone gain nothing sure here: in so little KV memory, what they bring displaces as much."""
    requests = list(open_trace(TraceRecipe("synthetic", seed=1, clip_end_s=60.0, rate_scale=5.0)))
    instance = InstanceConfig(kv_blocks=600, max_model_len_tokens=8192, max_queued_requests=10_000)
    plain = ClusterConfig(3, instance, failures=(Failure(1, 20.0, 5.0),))
    outcomes, simulation = simulate(requests, replace(plain, kv_reuse=reuse), "penstock")
    without, _ = simulate(requests, plain, "penstock")
    assert all(not each.error for each in outcomes)
    assert bool(simulation.loads.loads) == bool(reuse.host_factor)
    assert simulation.pulls.outcomes[PullOutcome.PULLED] or reuse.host_factor
    if reuse.host_factor:
        assert sum(each.cached_tokens for each in outcomes) > 1.2 * sum(each.cached_tokens for each in without)


def test_steps_taken_at_once_change_nothing() -> None:
    requests = list(open_trace(TraceRecipe("synthetic", seed=3, clip_end_s=20.0, rate_scale=5.0)))
    instance = InstanceConfig(kv_blocks=600, max_model_len_tokens=8192, max_queued_requests=10_000)
    config = ClusterConfig(3, instance, kv_reuse=KvReuseConfig(True, 2.0, 2))
    assert (
        simulate(requests, config, "penstock")[0]
        == simulate(requests, replace(config, skip_steps=False), "penstock")[0]
    )


@pytest.mark.parametrize(("asked_ms", "tokens"), [(200.0, 512), (5.0, 256)])
def test_blocks_that_the_source_is_computing_are_waited_for_but_not_for_long(asked_ms: float, tokens: int) -> None:
    """Two steps of 270 ms compute them, and half of the 522 ms of computing them is spent on waiting."""
    config = replace(PULLS, instance=replace(SMALL, max_step_tokens=260))
    simulation = ClusterSimulation([same(0.0)], config, COST, create_policy("round_robin"))
    source, submitted_ms = simulation.workers["instance-0"].description, list[float]()

    def begin(_: float) -> None:
        wanted = CountedRequest("r", 520, 1, block_hashes=prompt_block_hashes(same(0.0), 16))
        submit = lambda: submitted_ms.append(simulation.events.now_ms)  # noqa: E731
        assert simulation.pulls.begin("instance-1", wanted, PrefixPull(source, 512, 1.0, 500.0), submit)

    simulation.events.at(asked_ms, Rank.ARRIVAL, begin)
    simulation.run()
    assert simulation.pulls.outcomes == {PullOutcome.PULLED: 1}
    assert simulation.pulls.pulled_tokens == tokens
    assert len(submitted_ms) == 1
    simulation.pulls.validate()


def test_siblings_share_a_pull() -> None:
    requests = [same(0.0), *(same(2.0 + 0.001 * number) for number in range(4))]
    outcomes, simulation = simulate(requests, replace(PULLS, instances=2))
    assert [each.instance_id[-1] for each in outcomes] == ["0", "1", "0", "1", "0"]
    assert simulation.pulls.outcomes == {PullOutcome.PULLED: 1}
    assert [each.cached_tokens for each in outcomes[1:]] == [512] * 4


def test_who_is_placed_where_its_prefix_is_being_pulled_to_waits_for_it() -> None:
    """Without an order of its own: its placement counts the prefix as cached there."""
    simulation = ClusterSimulation([same(0.0)], PULLS, COST, create_policy("round_robin"))
    source, submitted_ms = simulation.workers["instance-0"].description, dict[str, float]()

    def begin(name: str, pull: PrefixPull | None, group: int = 0) -> bool:
        wanted = CountedRequest(name, 520, 1, block_hashes=prompt_block_hashes(same(0.0, group), 16))
        submit = lambda: submitted_ms.update({name: simulation.events.now_ms})  # noqa: E731
        return simulation.pulls.begin("instance-1", wanted, pull, submit)

    def come(_: float) -> None:
        assert not begin("before", None)
        assert begin("first", PrefixPull(source, 512, 1.0, 500.0))
        assert begin("second", None)
        assert not begin("other", None, group=1)

    simulation.events.at(2000.0, Rank.ARRIVAL, come)
    simulation.run()
    assert simulation.pulls.outcomes == {PullOutcome.PULLED: 1}
    assert submitted_ms["first"] == submitted_ms["second"] > 2000.0
    simulation.pulls.validate()


def test_the_books_of_pulls_are_right_at_every_moment_of_a_mesh_that_breaks() -> None:
    requests = [same(0.04 * number, number % 5) for number in range(60)]
    config = replace(PULLS, instances=3, failures=(Failure(0, 0.7, 0.4), Failure(1, 1.3, 0.3)))
    simulation = ClusterSimulation(requests, config, COST, create_policy("round_robin"))
    while not simulation.events.is_over:
        simulation.events.run_next()
        simulation.pulls.validate()
    assert not any(each.error for each in simulation.ledger.outcomes())
    assert simulation.pulls.outcomes[PullOutcome.PULLED] > 3
    assert not any(worker.instance.request_ids for worker in simulation.workers.values())
