"""One instance's part in the stages: what it tells its neighbours, where its range ends, what it hands off.

The paper's LoadTracker and Coordinator (CascadeInfer, section 3.1) as one pure object, for one set of parameters. The
`StageManager` holds it and keeps it at the plan in force.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Annotated, TypeAlias

import msgspec

from controlplane.model.running_request import RunningRequest
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.neighbours import Neighbours, StageReport
from controlplane.policies.stages.refinement import Boundary, RefinementParameters, RequestLength
from controlplane.protocols.bid_ask import receiver, sender
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import Ask, Award, Begun, Busy, Done, Message, Withdrawn
from controlplane.protocols.bid_ask.receiver import BidAskReceiver, Capacity
from controlplane.protocols.bid_ask.sender import BidAskSender, Closed, Migrate
from mesh.invariants import invariants


class RoutingMode(StrEnum):
    """How the next stage's instance is found for a request that has outgrown its own."""

    BID_ASK = "bid_ask"
    ROUND_ROBIN = "round_robin"
    """One after the other, whatever their load; a rival."""


class StageParameters(msgspec.Struct, frozen=True):
    """How an instance behaves within its stage."""

    refinement: RefinementParameters = RefinementParameters()
    routing_mode: RoutingMode = RoutingMode.BID_ASK
    rebalance: bool = True
    """Whether overloaded instances offer requests within their stage."""
    overload_share: Annotated[float, msgspec.Meta(ge=0)] = 0.25
    """An instance is overloaded when so much above its stage's mean (section 4.4)."""
    report_interval_s: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    """Between two reports to the neighbours."""
    stale_s: Annotated[float, msgspec.Meta(gt=0)] = 3.0
    """A neighbour's report that is older counts for nothing."""
    retry_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """A request that found no taker is not offered again before this has passed."""
    settle_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    """A request is not rebalanced within the stage again before this has passed."""


@dataclass(frozen=True, slots=True)
class ToPeer:
    """Send this to another instance."""

    instance_id: str
    message: Message | StageReport


@dataclass(frozen=True, slots=True)
class BoundaryMoved:
    """The instance's range ends here now; tell whoever places requests."""

    boundary_tokens: float


AgentInstruction: TypeAlias = ToPeer | Migrate | Closed | BoundaryMoved
TO_RECEIVER = (Ask, Award, Begun, Busy, Withdrawn, Done)


class StageAgent:
    """Call a method for every event and carry out what comes back, in order.

    Times are milliseconds on the holder's clock; `capacity` is always this instance's own at that moment. Raises
    `IllegalTransition` where the bid-ask protocol was broken; the agent is of no more use then.
    """

    def __init__(self, instance_id: str, name: str, parameters: StageParameters, limits: BidAskLimits) -> None:
        """`name` is part of every ask id: no two agents of the mesh may share one."""
        self.instance_id = instance_id
        self.name = name
        self.parameters = parameters
        self.sender = BidAskSender(name, limits)
        self.receiver = BidAskReceiver(limits)
        self.layout: StageLayout | None = None
        """Of instances that are alive; None: no stages, nothing is handed off."""
        self.boundary: Boundary | None = None
        """None in the last stage."""
        self._model: QoeModel | None = None
        self._planned_tokens: int | None = 0
        """Where the plan ends this instance's range; 0 before the first one."""
        self._running: tuple[RunningRequest, ...] = ()
        """Requests that decode here, as of the last tick."""
        self._neighbours = Neighbours(1000 * parameters.stale_s)
        self._rested_ms: dict[str, float] = {}
        """Requests not to be offered before."""
        self._settled_ms: dict[str, float] = {}
        """Requests not to be rebalanced before."""
        self._turn = 0
        self._reported_ms = -inf
        self._refined_ms = -inf
        """Last refinement, or the first moment of the boundary."""

    @property
    def stage(self) -> int | None:
        """Where this instance is, counted from 0."""
        return None if self.layout is None else self.layout.stage_with(self.instance_id)

    def use_layout(
        self, layout: StageLayout | None, model: QoeModel | None, now_ms: float
    ) -> tuple[AgentInstruction, ...]:
        """From now on; `layout` knows only instances that are alive (see `StageLayout.covering`). Where the plan has
        another end of this instance's range than before, refinement starts from there; under a new plan with the same
        end it goes on, and what it has found is told as the new plan's."""
        is_replanned = layout is not None and self.layout is not None and layout.revision != self.layout.revision
        self.layout, self._model = layout, model
        stage = self.stage
        is_bounded = layout is not None and stage is not None and stage < len(layout.boundaries_tokens)
        planned = layout.boundaries_tokens[stage] if is_bounded else None  # type: ignore[index, union-attr]
        if planned == self._planned_tokens:
            return (BoundaryMoved(self.boundary.tokens),) if is_replanned and self.boundary is not None else ()
        self._planned_tokens = planned
        self._refined_ms = now_ms
        if planned is None:
            self.boundary = None
            return (BoundaryMoved(inf),)
        self.boundary = Boundary(planned, self.parameters.refinement)
        return (BoundaryMoved(planned),)

    def receive(
        self, instance_id: str, message: Message | StageReport, capacity: Capacity, now_ms: float
    ) -> tuple[AgentInstruction, ...]:
        """A report or a bid-ask message has come from another instance."""
        if isinstance(message, StageReport):
            self._neighbours.heard(instance_id, message, now_ms)
            return ()
        if isinstance(message, TO_RECEIVER):
            if isinstance(message, Done) and message.moved and (arrived := self.receiver.request_of(message.ask_id)):
                self._settled_ms[arrived] = now_ms + 1000 * self.parameters.settle_s
            return _to_peers(self.receiver.receive(instance_id, message, capacity, now_ms))
        return self._of_sender(self.sender.receive(instance_id, message, now_ms), now_ms)

    @property
    def offered(self) -> tuple[str, ...]:
        """Ids of the requests on offer; the holder calls `request_ended` for those that run here no more."""
        return self.sender.offered

    def request_ended(self, request_id: str, now_ms: float) -> tuple[AgentInstruction, ...]:
        """A request on offer has finished, was aborted or has left otherwise."""
        return self._of_sender(self.sender.handle(sender.RequestEnded(request_id), now_ms), now_ms)

    def migration_ended(self, request_id: str, moved: bool, reason: str, now_ms: float) -> tuple[AgentInstruction, ...]:
        """A migration that `Migrate` asked for is over; call it once for each, within `BidAskLimits.transfer_ms`."""
        event = sender.MigrationEnded(request_id, moved, reason)
        return self._of_sender(self.sender.handle(event, now_ms), now_ms)

    def peer_lost(self, instance_id: str, capacity: Capacity, now_ms: float) -> tuple[AgentInstruction, ...]:
        """Another instance has died or can be heard no more: its promises and ours to it are void."""
        self._neighbours.forget(instance_id)
        freed = self.receiver.lost(instance_id, capacity, now_ms)
        return (
            *self._of_sender(self.sender.handle(sender.PeerLost(instance_id), now_ms), now_ms),
            *_to_peers(freed),
        )

    def tick(
        self, capacity: Capacity, running: tuple[RunningRequest, ...], now_ms: float
    ) -> tuple[AgentInstruction, ...]:
        """Time has passed; `running` are the requests that decode here now."""
        self._running = running
        instructions = list(self._of_sender(self.sender.handle(sender.Tick(), now_ms), now_ms))
        instructions += _to_peers(self.receiver.tick(capacity, now_ms))
        stage = self.stage
        if self.layout is None or stage is None:
            return tuple(instructions)
        self._forget_ended()
        instructions += self._report(self.layout, stage, capacity.load_tokens, now_ms)
        instructions += self._refine(self.layout, stage, now_ms)
        if capacity.transfer_obstacle:
            return tuple(instructions)  # no request can leave: offers would hold promises of others for nothing
        instructions += self._hand_off(self.layout, stage, now_ms)
        if self.parameters.rebalance:
            instructions += self._rebalance(self.layout, stage, capacity.load_tokens, now_ms)
        return tuple(instructions)

    @invariants
    def validate(self) -> None:
        """Check what must hold between two calls. Raises `InvariantBroken`."""
        self.sender.validate()
        self.receiver.validate()
        stage = self.stage
        is_bounded = self.layout is not None and stage is not None and stage < len(self.layout.boundaries_tokens)
        assert (self.boundary is not None) == is_bounded, f"only stages before the last one end, {stage} is not so"
        assert self.boundary is None or self.boundary.tokens > 0, "a stage covers at least one length"

    # -- steps

    def _report(self, layout: StageLayout, stage: int, load_tokens: int, now_ms: float) -> list[AgentInstruction]:
        """To the peers of the stage and to both neighbouring ones (the paper: upstream; downstream needs our end)."""
        if now_ms - self._reported_ms < 1000 * self.parameters.report_interval_s:
            return []
        self._reported_ms = now_ms
        boundary_tokens = None if self.boundary is None else self.boundary.tokens
        report = StageReport.of(load_tokens, boundary_tokens, self._lengths())
        around = layout.stages[max(stage - 1, 0) : stage + 2]
        return [ToPeer(each, report) for stage in around for each in stage if each != self.instance_id]

    def _refine(self, layout: StageLayout, stage: int, now_ms: float) -> list[AgentInstruction]:
        interval_ms = 1000 * self.parameters.refinement.interval_s
        if self.boundary is None or self._model is None or now_ms - self._refined_ms < interval_ms:
            return []
        self._refined_ms = now_ms
        successors = [
            report.lengths for each in layout.stages[stage + 1] if (report := self._neighbours.fresh(each, now_ms))
        ]
        lower = self._end_of(layout, stage - 1, now_ms) if stage > 0 else 0.0
        upper = self._end_of(layout, stage + 1, now_ms)
        moved = self.boundary.refine(self._lengths(), successors, self._model, lower_tokens=lower, upper_tokens=upper)
        return [BoundaryMoved(self.boundary.tokens)] if moved else []

    def _end_of(self, layout: StageLayout, stage: int, now_ms: float) -> float:
        """Where a neighbouring stage's range ends: the mean of what its instances say, else the plan."""
        if stage >= len(layout.boundaries_tokens):
            return inf
        said = [
            report.boundary_tokens
            for each in layout.stages[stage]
            if (report := self._neighbours.fresh(each, now_ms)) and report.boundary_tokens is not None
        ]
        return sum(said) / len(said) if said else layout.boundaries_tokens[stage]

    def _hand_off(self, layout: StageLayout, stage: int, now_ms: float) -> list[AgentInstruction]:
        """Offer what has outgrown the range to the stage that covers it."""
        instructions: list[AgentInstruction] = []
        if self.boundary is None:
            return instructions
        for request in outgrown(self._running, self.boundary.tokens):
            if not self.sender.has_room:
                break
            if not self._may_offer(request.request_id, now_ms):
                continue
            target = max(stage + 1, layout.stage_of(request.context_tokens))
            candidates: Sequence[str] = layout.stages[target]
            if self.parameters.routing_mode is RoutingMode.ROUND_ROBIN:
                self._turn += 1
                candidates = (candidates[self._turn % len(candidates)],)
            offered = self.sender.offer(
                request.request_id, request.context_tokens, candidates, now_ms, frontend_id=request.frontend_id
            )
            instructions += self._of_sender(offered, now_ms)
        return instructions

    def _rebalance(self, layout: StageLayout, stage: int, load_tokens: int, now_ms: float) -> list[AgentInstruction]:
        """Offer what lies above the stage's mean to the peers that are below it."""
        loads = {
            each: report.load_tokens
            for each in layout.stages[stage]
            if each != self.instance_id and (report := self._neighbours.fresh(each, now_ms))
        }
        own_tokens = load_tokens - self.sender.load_tokens
        excess = excess_tokens(own_tokens, tuple(loads.values()), self.parameters.overload_share)
        if not excess:
            return []
        light = tuple(each for each, tokens in loads.items() if tokens < own_tokens - excess)
        free = [
            request
            for request in self._running
            if self._may_offer(request.request_id, now_ms)
            and now_ms >= self._settled_ms.get(request.request_id, -inf)
            and (self.boundary is None or request.context_tokens <= self.boundary.tokens)
        ]
        instructions: list[AgentInstruction] = []
        for request in relieving(free, excess):
            ceiling = own_tokens - 2 * request.context_tokens
            own_tokens -= request.context_tokens
            offered = self.sender.offer(
                request.request_id,
                request.context_tokens,
                light,
                now_ms,
                ceiling_tokens=ceiling,
                frontend_id=request.frontend_id,
            )
            instructions += self._of_sender(offered, now_ms)
        return instructions

    def _may_offer(self, request_id: str, now_ms: float) -> bool:
        is_offered = self.sender.state_of(request_id) is not None
        return not is_offered and now_ms >= self._rested_ms.get(request_id, -inf)

    def _lengths(self) -> list[RequestLength]:
        return [
            RequestLength(request.context_tokens - request.generated_tokens, request.context_tokens)
            for request in self._running
        ]

    def _forget_ended(self) -> None:
        here = {request.request_id for request in self._running}
        for times in (self._rested_ms, self._settled_ms):
            for request_id in [each for each in times if each not in here]:
                del times[request_id]

    def _of_sender(
        self, instructions: Sequence[sender.SenderInstruction], now_ms: float
    ) -> tuple[AgentInstruction, ...]:
        found: list[AgentInstruction] = []
        for instruction in instructions:
            match instruction:
                case sender.Send(instance_id, message):
                    found.append(ToPeer(instance_id, message))
                case Closed(moved=False):
                    self._rested_ms[instruction.request_id] = now_ms + 1000 * self.parameters.retry_s
                    found.append(instruction)
                case _:
                    found.append(instruction)
        return tuple(found)


def _to_peers(sends: Sequence[receiver.Send]) -> tuple[ToPeer, ...]:
    return tuple(ToPeer(send.instance_id, send.message) for send in sends)


def outgrown(running: Iterable[RunningRequest], boundary_tokens: float) -> list[RunningRequest]:
    """Requests that have grown beyond the instance's range, the longest first."""
    beyond = [request for request in running if request.context_tokens > boundary_tokens]
    return sorted(beyond, key=lambda request: -request.context_tokens)


def excess_tokens(own_tokens: int, peers_tokens: Sequence[int], overload_share: float) -> float:
    """Load above the stage's mean, of an instance that is more than `overload_share` over it; otherwise 0."""
    mean = (own_tokens + sum(peers_tokens)) / (1 + len(peers_tokens))
    return own_tokens - mean if own_tokens > (1 + overload_share) * mean else 0.0


def relieving(running: Iterable[RunningRequest], excess: float) -> list[RunningRequest]:
    """Requests whose contexts together come closest to the excess without exceeding it, taking the longest first.

    The paper does not say which requests leave; the tokens to be moved are the same, and so the fewest requests move.
    """
    chosen: list[RunningRequest] = []
    for request in sorted(running, key=lambda request: -request.context_tokens):
        if request.context_tokens <= excess:
            chosen.append(request)
            excess -= request.context_tokens
    return chosen
