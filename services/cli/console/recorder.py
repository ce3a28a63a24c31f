"""What the live console would have shown of a run, moment by moment: the same view over made-up looks at the mesh."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from controlplane.load_message import load_message
from controlplane.model.instance import InstanceDescription, InstanceState, LoadReport
from controlplane.model.placement import Placement
from controlplane.scheduler.explanations import NO_POOLS, Explanations
from controlplane.scheduler.service import recent_placement
from mesh.membership import Member
from penstock.v1 import (
    autoscale_pb2,
    cascade_pb2,
    frontend_pb2,
    monitor_pb2,
    planner_pb2,
    scheduler_pb2,
    stages_pb2,
    worker_pb2,
)
from services.cli.console.longest_stories import LongestStories
from services.frontend.console.collector import OPTIONS, PLACEMENTS, Look
from services.frontend.console.recorded import MAX_RECORDING_BYTES, Moments, encode_run
from services.frontend.console.requests import SHOWN_RUNNING, Story, placement_row, story
from services.frontend.console.view import SHOWN_MOVES, View, move_row
from services.frontend.console.window import Objectives

MAX_EXPLAINED: Final = 4096
MAX_EXPLAINED_BYTES: Final = 64 << 20
FRONTEND: Final = Member("frontend", "frontend", "1", "", "", {})
SCHEDULER: Final = Member("scheduler", "scheduler", "1", "", "", {})
MONITOR: Final = Member("monitor", "monitor", "1", "", "", {})


@dataclass(slots=True)
class OpenRequest:
    """A request that was placed and has not ended."""

    request_id: str
    model: str
    placed_ms: float
    prompt_tokens: int
    first_instance_id: str
    instance_id: str
    recoveries: int = 0
    moves: list[scheduler_pb2.ReschedulerOrder] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InstanceNow:
    """An instance at the moment of a look."""

    description: InstanceDescription
    load: LoadReport
    state: InstanceState
    cached_blocks: int
    is_stale: bool = False
    pool: str = ""


@dataclass(slots=True)
class ConsoleRecorder:
    """Takes in what happens, looks now and then, and is a recorded run at the end."""

    name: str
    policy: scheduler_pb2.GetPolicyResponse
    objectives: Objectives
    rescheduler: str = ""
    moments: Moments = field(default_factory=Moments)
    open: dict[str, OpenRequest] = field(default_factory=dict)
    """In the order in which they were placed first."""
    ended: int = 0
    _moves: deque[scheduler_pb2.ReschedulerOrder] = field(default_factory=lambda: deque(maxlen=SHOWN_MOVES))
    _moved: int = 0
    _stayed: int = 0
    _ended_lately: list[frontend_pb2.EndedRequest] = field(default_factory=list)
    _explanations: Explanations = field(default_factory=lambda: Explanations(MAX_EXPLAINED, MAX_EXPLAINED_BYTES))
    _stories: LongestStories = field(default_factory=LongestStories)
    _view: View = field(init=False)

    def __post_init__(self) -> None:
        self._view = View(self.objectives)

    def placed(self, placement: Placement, now_ms: float, pools: Mapping[str, str] = NO_POOLS) -> None:
        """A request has got an instance, for the first time or again."""
        request, instance_id = placement.request, placement.instance.instance_id
        self._explanations.add(placement, int(now_ms), pools)
        former = self.open.get(request.request_id)
        if former is None:
            self.open[request.request_id] = OpenRequest(
                request.request_id, request.model, now_ms, request.prompt_tokens, instance_id, instance_id
            )
        else:
            former.instance_id, former.recoveries = instance_id, former.recoveries + 1

    def moved(self, order: scheduler_pb2.ReschedulerOrder) -> None:
        """A migration has ended."""
        has_moved = order.outcome == scheduler_pb2.ORDER_OUTCOME_MOVED
        self._moved, self._stayed = self._moved + has_moved, self._stayed + (not has_moved)
        self._moves.append(order)
        if (request := self.open.get(order.request_id)) is not None:
            request.moves.append(order)
            if has_moved:
                request.instance_id = order.target_instance_id

    def ends(self, request: OpenRequest, message: frontend_pb2.EndedRequest) -> None:
        """A request that was open has ended; `message` has the times, and this adds what is known here."""
        self.open.pop(request.request_id, None)
        self.ended += 1
        message.number = self.ended
        message.request_id, message.model = request.request_id, request.model
        message.instance_id, message.last_instance_id = request.first_instance_id, request.instance_id
        message.policy, message.choices = self.policy.policy, 1
        message.moves = sum(order.outcome == scheduler_pb2.ORDER_OUTCOME_MOVED for order in request.moves)
        message.recoveries = request.recoveries
        self._ended_lately.append(message)
        if self._stories.has_room_for(message.ended_ms):
            self._stories.add(message.ended_ms, self._story(message, request))

    def look(self, now_ms: float, instances: Iterable[InstanceNow], generated: Mapping[str, int]) -> None:
        """Keep this moment, if it is due. `generated`: tokens so far of running requests, as far as they are known."""
        if not self.moments.is_due(now_ms):
            return
        at, instances = int(now_ms), list(instances)
        members = [_worker(each.description) for each in instances]
        running = frontend_pb2.ListFrontendRequestsResponse(
            requests=[_running(request, now_ms, generated) for request in self.open.values()]
        )
        lately, self._ended_lately = self._ended_lately, []
        placements = scheduler_pb2.ListPlacementsResponse(
            placements=[recent_placement(*each, OPTIONS) for each in self._explanations.latest(PLACEMENTS)]
        )
        status = frontend_pb2.GetFrontendStatusResponse(active_requests=len(self.open), requests_total=self.ended)
        state = self._view.add(
            Look(
                at_unix_ms=at,
                members=(FRONTEND, SCHEDULER, MONITOR, *members),
                missing_members=0,
                leaders={},
                unwell={},
                snapshot=scheduler_pb2.GetSnapshotResponse(
                    instances=map(_seen, instances), policy=self.policy.policy, synced=True
                ),
                cluster=monitor_pb2.GetClusterResponse(instances=map(_monitored, instances)),
                policies={SCHEDULER.member_id: self.policy},
                reschedulers={SCHEDULER.member_id: self._rescheduling()},
                placements={SCHEDULER.member_id: placements},
                frontends={FRONTEND.member_id: status},
                running={FRONTEND.member_id: running},
                ended={FRONTEND.member_id: frontend_pb2.ListEndedResponse(requests=lately, last=self.ended)},
                cascades=cascade_pb2.ListCascadesResponse(),
                plans=planner_pb2.ListPlansResponse(),
                stages=stages_pb2.GetStagesResponse(),
                scaled=autoscale_pb2.ListScaledResponse(),
                deployments=(),
            )
        )
        self.moments.add(state, now_ms)

    def oldest(self) -> list[OpenRequest]:
        """Open requests that a look shows one by one."""
        return [request for request, _ in zip(self.open.values(), range(SHOWN_RUNNING), strict=False)]

    def encode(self, facts: Mapping[str, str], max_bytes: int = MAX_RECORDING_BYTES) -> bytes:
        """The recorded run as JSON."""
        return encode_run(self.name, self.moments, facts, self._stories.by_id(), self.ended, max_bytes)

    def _rescheduling(self) -> scheduler_pb2.GetReschedulerResponse:
        return scheduler_pb2.GetReschedulerResponse(
            mode=self.rescheduler,
            in_charge=True,
            moved_total=self._moved,
            stayed_total=self._stayed,
            orders=self._moves,
        )

    def _story(self, message: frontend_pb2.EndedRequest, request: OpenRequest) -> Story:
        explanation = self._explanations.get(request.request_id)
        missing = () if explanation is not None else ("why it was placed where it was is not kept",)
        moves = [move_row(order) for order in request.moves]
        told = story(request.request_id, {FRONTEND.member_id: message}, {}, {}, moves, missing, 0)
        assert told is not None, "the request has ended"
        if explanation is None:
            return told
        recent = recent_placement(request.request_id, explanation, OPTIONS)
        placement = placement_row(SCHEDULER.member_id, recent.explanation, recent.instances, recent.excluded)
        return msgspec.structs.replace(told, placement=placement)


def _worker(description: InstanceDescription) -> Member:
    attributes = {"model": description.model, "engine": description.engine, "phase": description.phase.value}
    return Member("worker", description.instance_id, description.incarnation_id, description.address, "", attributes)


def _running(request: OpenRequest, now_ms: float, generated: Mapping[str, int]) -> frontend_pb2.FrontendRequest:
    return frontend_pb2.FrontendRequest(
        request_id=request.request_id,
        model=request.model,
        instance_id=request.instance_id,
        prompt_tokens=request.prompt_tokens,
        generated_tokens=generated.get(request.request_id, 0),
        age_ms=max(0, int(now_ms - request.placed_ms)),
    )


def _seen(each: InstanceNow) -> scheduler_pb2.SnapshotInstance:
    return scheduler_pb2.SnapshotInstance(
        instance_id=each.description.instance_id,
        model=each.description.model,
        state="stale" if each.is_stale else str(each.state),
        load=load_message(each.load, each.state),
        cached_blocks=each.cached_blocks,
        address=each.description.address,
        phase=each.description.phase.value,
        pool=each.pool,
    )


def _monitored(each: InstanceNow) -> monitor_pb2.ClusterInstance:
    description = worker_pb2.InstanceDescription(
        instance_id=each.description.instance_id,
        incarnation_id=each.description.incarnation_id,
        model=each.description.model,
        kv_blocks=each.description.kv_blocks,
        block_tokens=each.description.block_tokens,
    )
    return monitor_pb2.ClusterInstance(instance=description, load=load_message(each.load, each.state))
