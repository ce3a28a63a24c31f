"""Places requests: applies the policy in force to the current snapshot and keeps the explanation."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.duties import POOLS
from controlplane.model.frontend_links import MAX_LINKS, NOBODY, FrontendLinks
from controlplane.model.placement import Placement
from controlplane.model.shared_event import SharedEvent, SharedKind
from controlplane.policies.interface import Policy, has_pools, is_observer
from controlplane.policies.place import choose_decode, place, shared_events
from controlplane.scheduler import wire
from controlplane.scheduler.explanations import NO_POOLS, Explanations
from controlplane.scheduler.feed import ClusterFeed
from controlplane.scheduler.metrics import Gauges, SchedulerMetrics
from controlplane.scheduler.policy_switch import PolicySwitch, PoolsLead
from controlplane.scheduler.recorder import DecisionRecorder, Recorder
from controlplane.scheduler.settings import SchedulerSettings
from mesh.errors import NoInstance, PlacementError, UnknownModel
from mesh.runtime import Clock
from penstock.v1 import request_pb2, scheduler_pb2

log = logging.getLogger(__name__)

MAX_OPEN_DECODES = 100_000
"""Requests whose decode instance is to be asked for, as long as it is known which frontend they are of."""

OUTCOMES = {
    UnknownModel: scheduler_pb2.PLACE_OUTCOME_UNKNOWN_MODEL,
    NoInstance: scheduler_pb2.PLACE_OUTCOME_NO_INSTANCE,
}


class Observation:
    """Shows the cluster to policies that want to see it from time to time, whether or not anything is placed."""

    def __init__(self, on_shown: Callable[[float], None] = lambda _: None) -> None:
        """`on_shown` is called before the policy is shown anything, with the time."""
        self._on_shown = on_shown
        self._policy: Policy | None = None
        self._due_s = 0.0

    def tick(self, policy: Policy, table: ClusterTable, now_s: float) -> None:
        """Show the policy in force each model's instances if it is time; one that has just come into force at once."""
        if policy is not self._policy:
            self._policy, self._due_s = policy, now_s
        if not is_observer(policy) or now_s < self._due_s:
            return
        self._due_s += policy.interval_s
        if self._due_s <= now_s:  # what was missed is not made up for
            self._due_s = now_s + policy.interval_s
        self._on_shown(now_s)
        for model in table.models():
            if (snapshot := table.snapshot(model)) is not None:
                policy.observe(snapshot, now_s)


class PlacementService:
    """Answers place requests. What it knows of instances comes through `feed`, the policy in force through `switch`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        metrics: SchedulerMetrics,
        clock: Clock,
        pools: PoolsLead | None = None,
    ) -> None:
        """`pools` None: there is no other scheduler."""
        limits = ClusterLimits(max_indexed_blocks=settings.max_indexed_blocks)
        self.recorder = (
            None if settings.record is None else Recorder(settings.record, settings.record_mib << 20, limits)
        )
        self.feed = ClusterFeed(limits, None if self.recorder is None else self.recorder.new_table)
        self.switch = PolicySwitch(settings.policy, settings.monitor_silence_s, pools)
        self._lead = pools
        self.explanations = Explanations(settings.max_explanations, settings.max_explanation_mib << 20)
        self.pools: dict[str, str] = {}
        """Where the policy in force has each instance, if it keeps pools."""
        self._open_decodes: dict[str, FrontendLinks] = {}
        """Frontend of each request whose decode instance is to be asked for, oldest first."""
        self.share: Callable[[SharedEvent], None] = lambda event: None
        """Told of every placement, and of those that ended before they were reported."""
        self._recorded = DecisionRecorder(self.recorder, self.switch, lambda: self.feed.table)
        self._observation = Observation(self._recorded.shown)
        self._metrics = metrics
        self._clock = clock
        self.switch.refresh(None, clock.now_s())

    def place(
        self, message: scheduler_pb2.PlaceRequest, links: FrontendLinks | None = None
    ) -> scheduler_pb2.PlaceResponse:
        """Choose an instance, or say why there is none; only among those that the frontend is connected to, where its
        `links` are known."""
        if message.HasField("bounced_by"):
            self._correct(message.request_id, message.bounced_by)
        policy = self.switch.in_force
        request = wire.placement_request(message, self._clock.now_s(), self._unreachable(message.model, links))
        seen = self._recorded.before(request)
        started = self._clock.now_s()
        try:
            placement = place(self.feed.table, policy, request, asks_later=True)
        except PlacementError as error:
            self._recorded.placed(request, None, seen)
            return self._refusal(message, error)
        self._metrics.decision_seconds.observe(self._clock.now_s() - started)
        self._metrics.placements.labels(policy.name, placement.instance.instance_id).inc()
        if placement.is_split:
            self._metrics.split_placements.labels(placement.decode_instance.instance_id).inc()
        self._recorded.placed(request, placement, seen)
        for event in shared_events(placement):
            self.share(event)
        pools = policy.pools(message.model) if has_pools(policy) else NO_POOLS
        self.explanations.add(placement, int(1000 * self._clock.unix_s()), pools)
        if placement.is_decode_open and links is not None:
            self._open_decodes[message.request_id] = links
            if len(self._open_decodes) > MAX_OPEN_DECODES:
                del self._open_decodes[next(iter(self._open_decodes))]
        return _answer(placement, self.switch.leader_id)

    def _correct(self, request_id: str, bounced_by: scheduler_pb2.BouncedBy) -> None:
        self._metrics.bounces.labels(bounced_by.instance_id).inc()
        self.feed.table.ended(request_id)  # its instance, which says what it has, has it no more
        self.feed.table.corrected(bounced_by.instance_id, wire.present_load(bounced_by.present), self._clock.now_s())

    @contextmanager
    def frontend(self) -> Iterator[FrontendLinks]:
        """Count a frontend as there for as long as the block runs; what it is connected to comes by `linked`."""
        links = FrontendLinks()
        self.feed.linked(links)
        try:
            yield links
        finally:
            self.feed.unlinked(links)
            self.feed.review(self._clock.now_s())

    def linked(self, links: FrontendLinks, message: scheduler_pb2.LinkReport) -> None:
        """A frontend says which workers it is connected to now."""
        links.report(
            ((each.instance_id, each.incarnation_id) for each in message.workers[:MAX_LINKS]),
            frontend_id=message.frontend_id,
        )
        self.feed.review(self._clock.now_s())

    def place_decode(self, message: scheduler_pb2.PlaceDecodeRequest) -> scheduler_pb2.PlaceDecodeResponse:
        """Choose who decodes a request, now that its prompt is computed; or say who is to be asked."""
        if self.switch.is_standby:
            return scheduler_pb2.PlaceDecodeResponse(leader_id=self.switch.leader_id)
        links = self._open_decodes.pop(message.request_id, None)
        request = wire.decode_request(message, self._clock.now_s(), self._unreachable(message.model, links))
        seen = self._recorded.before(request)
        chosen = choose_decode(self.feed.table, self.switch.in_force, request, message.prefill_instance_id)
        decode_id = ""
        if chosen is not None:
            instances, choice = chosen
            self.explanations.decode_chosen(request.request_id, instances, choice)
            instance_id = instances[choice.row].instance_id
            decode_id = "" if instance_id == message.prefill_instance_id else instance_id
        self._recorded.decode_placed(request, message.prefill_instance_id, decode_id, seen)
        if decode_id:
            self.share(SharedEvent(SharedKind.ARRIVING, request.request_id, decode_id, request.prompt_tokens))
            self._metrics.split_placements.labels(decode_id).inc()
        answer = scheduler_pb2.PlaceDecodeResponse(instance_id=decode_id)
        if self._lead is not None and self.switch.leader_id:
            answer.leader_id = self.switch.leader_id
            if self._lead.is_leading:
                answer.fencing.duty, answer.fencing.epoch = POOLS, self._lead.epoch
                answer.fencing.leader = answer.leader_id
        return answer

    def ended(self, message: scheduler_pb2.RequestEnded) -> None:
        """A placed request is over: it is no longer counted for its instance before a report says so."""
        self._open_decodes.pop(message.request_id, None)
        for instance_id in self.feed.table.ended(message.request_id):
            self.share(SharedEvent(SharedKind.ENDED, message.request_id, instance_id))

    def shared(self, event: SharedEvent) -> bool:
        """Another scheduler tells of a placement or an ending; see `ClusterTable.shared`."""
        return self.feed.table.shared(event, self._clock.now_s())

    @property
    def configured(self) -> Policy:
        """The policy that operators have chosen, whether or not it is in force."""
        return self.switch.configured

    def model_pools(self) -> dict[str, Mapping[str, str]]:
        """Where the configured policy has each instance, by model; empty if it keeps no pools."""
        policy = self.switch.configured
        return {model: policy.pools(model) for model in self.feed.table.models()} if has_pools(policy) else {}

    def resume_pools(self, model: str, pools: Mapping[str, str]) -> None:
        """Have the configured policy, which keeps pools, go on with those that another scheduler had made."""
        policy = self.switch.configured
        assert has_pools(policy), f"{policy.name} keeps pools"
        self._recorded.resumed(model, pools)
        policy.resume(model, pools)

    def tick(self) -> None:
        """Look at the clock: is the monitor still heard, have placed requests failed to arrive?"""
        now_s = self._clock.now_s()
        if self.switch.refresh(self.feed.heard_s, now_s):
            self._note_fallback()
        self.feed.review(now_s)
        forgotten = self.feed.table.forget_unreported(now_s)
        if forgotten:
            self._metrics.forgotten.inc(forgotten)
            log.warning("placed requests were never reported by their workers", extra={"requests": forgotten})
        policy, table = self.switch.in_force, self.feed.table
        self._observation.tick(policy, table, now_s)
        self.pools = _pools(policy, table)
        if self.recorder is not None:
            self.recorder.flush()

    def heard_age_ms(self) -> int:
        """Milliseconds since the monitor was last heard; 0 if it never was."""
        heard_s = self.feed.heard_s
        return 0 if heard_s is None else int(1000 * (self._clock.now_s() - heard_s))

    def not_ready(self) -> str:
        """Why nothing can be placed yet; empty if it can."""
        return "" if self.feed.heard_s is not None else "the scheduler has not heard from a monitor yet; retry shortly"

    def gauges(self) -> Gauges:
        """The state for Prometheus, read from another thread: only what a single step of the interpreter reads."""
        table = self.feed.table
        return Gauges(
            policy=self.switch.configured.name,
            fallback=bool(self.switch.fallback_reason) and not self.switch.is_standby,
            synced=self.feed.synced,
            instances=len(table.instances()),
            placeable_instances=table.placeable_instances(),
            unmonitored_instances=len(self.feed.by_last_load),
            indexed_blocks=len(table.index),
            refused_blocks_total=self.feed.refused_blocks_total,
            unreported_requests=table.unreported_requests(),
            explanations=len(self.explanations),
            pools=self.pools,
        )

    def _unreachable(self, model: str, links: FrontendLinks | None) -> frozenset[str]:
        """Instances that the frontend cannot send a request to, nor hear of it from."""
        snapshot = None if links is None else self.feed.table.snapshot(model)
        return NOBODY if links is None or snapshot is None else links.unreachable(model, snapshot.instances)

    def _refusal(self, message: scheduler_pb2.PlaceRequest, error: PlacementError) -> scheduler_pb2.PlaceResponse:
        outcome, text = OUTCOMES[type(error)], str(error)
        if not_ready := self.not_ready():  # it cannot say that a model does not exist, nor that nobody can serve it
            outcome, text = scheduler_pb2.PLACE_OUTCOME_NOT_READY, not_ready
        self._metrics.refusals.labels(scheduler_pb2.PlaceOutcome.Name(outcome)).inc()
        return scheduler_pb2.PlaceResponse(
            request_id=message.request_id,
            outcome=outcome,
            policy=self.switch.in_force.name,
            message=text,
            leader_id=self.switch.leader_id,
        )

    def _note_fallback(self) -> None:
        if self.switch.is_standby:
            log.info("standing by", extra={"reason": self.switch.fallback_reason})
        elif self.switch.fallback_reason:
            self._metrics.fallbacks.inc()
            log.error(
                "placing by the fallback policy",
                extra={"fallback": self.switch.in_force.name, "reason": self.switch.fallback_reason},
            )
        else:
            log.warning("placing by the configured policy again", extra={"policy": self.switch.in_force.name})


def _answer(placement: Placement, leader_id: str) -> scheduler_pb2.PlaceResponse:
    pull = placement.pull
    prefix = None
    if pull is not None:
        prefix = request_pb2.PrefixSource(
            instance_id=pull.source.instance_id, tokens=pull.tokens, comes_ms=round(pull.comes_ms)
        )
    return scheduler_pb2.PlaceResponse(
        request_id=placement.request.request_id,
        outcome=scheduler_pb2.PLACE_OUTCOME_PLACED,
        instance_id=placement.instance.instance_id,
        address=placement.instance.address,
        cached_tokens=placement.cached_tokens,
        policy=placement.policy,
        decode_instance_id=placement.decode_instance.instance_id if placement.is_split else "",
        is_decode_open=placement.is_decode_open,
        leader_id=leader_id,
        prefix=prefix,
        belief=None if placement.belief is None else wire.belief_message(placement.belief),
    )


def _pools(policy: Policy, table: ClusterTable) -> dict[str, str]:
    if not has_pools(policy):
        return {}
    return {instance_id: pool for model in table.models() for instance_id, pool in policy.pools(model).items()}
