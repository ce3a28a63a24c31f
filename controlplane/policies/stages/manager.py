"""One worker's part in the stages: the plan in force, who is alive, and one agent after the other.

The worker's shell and the simulator's feed the same events and carry out the same instructions; nothing is decided
there. An agent has one set of parameters for life, so another plan may bring another agent; deals of the one before end
as if the worker had restarted.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeAlias

import msgspec

from controlplane.model.running_request import RunningRequest
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import AgentInstruction, BoundaryMoved, StageAgent, StageParameters, ToPeer
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.neighbours import StageReport
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import Message
from controlplane.protocols.bid_ask.receiver import Capacity
from controlplane.protocols.bid_ask.sender import Closed, Migrate
from mesh.errors import IllegalTransition
from mesh.invariants import invariants

TICK_MS: Final = 50.0
"""Between two `Tick` events, live and simulated: a third of the time that bids are waited for."""


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """Another plan of this instance's model is in force; `layout` None: none is any more."""

    layout: StageLayout | None
    quality_model: QoeModel | None = None
    parameters: StageParameters = field(default_factory=StageParameters)


@dataclass(frozen=True, slots=True)
class ReschedulerChanged:
    """The mesh's rescheduler has been switched on or off. While it is on it alone balances within the stages: the two
    would undo each other's work."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """The other instances of the model that are alive and could take KV of this one."""

    instance_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Another instance has died, or the stream of messages to it has ended."""

    instance_id: str
    capacity: Capacity
    """This instance's own at the moment, here as in every event."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Another instance has sent a message."""

    instance_id: str
    message: Message | StageReport
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A migration that `MoveRequest` asked for is over; comes once for each."""

    order_id: str
    moved: bool
    reason: str = ""
    """Why the request stayed; empty if it moved."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; comes every `TICK_MS`."""

    capacity: Capacity
    running: tuple[RunningRequest, ...]
    """Requests that decode here."""
    ended: tuple[str, ...] = ()
    """Requests on offer (`StageManager.offered`) that run here no more."""


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """Start the live migration of a request; answer with `MoveEnded` when it is over."""

    order_id: str
    request_id: str
    target_instance_id: str


@dataclass(frozen=True, slots=True)
class StageChanged:
    """This instance is in another stage now, counted from 0; None: in none."""

    stage: int | None


@dataclass(frozen=True, slots=True)
class StartedOver:
    """The bid-ask protocol was broken, which is a bug: its deals were dropped, a fresh agent goes on."""

    reason: str


StageEvent: TypeAlias = PlanChanged | ReschedulerChanged | PeersChanged | PeerLost | Heard | MoveEnded | Tick
StageInstruction: TypeAlias = ToPeer | MoveRequest | Closed | BoundaryMoved | StageChanged | StartedOver


class StageManager:
    """Feed every event to `handle` and carry out what comes back, in order. One for each life of an instance.

    Without a plan it hands nothing over, but answers what others ask.
    """

    def __init__(self, instance_id: str, incarnation_id: str, limits: BidAskLimits | None = None) -> None:
        """`incarnation_id` becomes part of every ask id, so that no two lives of an instance share one."""
        self.agent: StageAgent | None = None
        """None before the first plan and the first message."""
        self.stage: int | None = None
        self.is_rescheduled = False
        """Whether the mesh's rescheduler is on, which then balances within the stages."""
        self._instance_id = instance_id
        self._incarnation_id = incarnation_id
        self._limits = limits or BidAskLimits()
        self._plan: PlanChanged | None = None
        self._alive = frozenset({instance_id})
        self._numbers = count(1)
        self._moving: dict[str, tuple[StageAgent, str]] = {}
        """Who asked for each migration under way, perhaps a former agent, and of which request; by order id."""

    @property
    def offered(self) -> tuple[str, ...]:
        """Ids of the requests on offer: `Tick.ended` names those of them that are gone."""
        return () if self.agent is None else self.agent.offered

    @property
    def revision(self) -> int:
        """Of the plan in force; 0 without one."""
        return 0 if self._plan is None or self._plan.layout is None else self._plan.layout.revision

    def handle(self, event: StageEvent, now_ms: float) -> tuple[StageInstruction, ...]:
        """Take in an event. Never raises because of what others said: see `StartedOver`."""
        try:
            return self._handled(event, now_ms)
        except IllegalTransition as error:
            self.agent = None
            return (StartedOver(str(error)), *self._use_layout(now_ms))

    @invariants
    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        assert self._instance_id in self._alive, "an instance that decides is alive"
        assert self.agent is not None or self._plan is None, "a plan has an agent"
        assert self.agent is None or self.stage == self.agent.stage, "every change of the stage was told"
        if self.agent is not None:
            self.agent.validate()
            moving = sum(agent is self.agent for agent, _ in self._moving.values())
            assert moving == self.agent.sender.moving, "every transfer of the agent was asked for and is under way"
            if self._plan is not None:
                assert self.agent.parameters == self._parameters, "the agent has the plan's parameters"

    def _handled(self, event: StageEvent, now_ms: float) -> tuple[StageInstruction, ...]:
        match event:
            case PlanChanged():
                return self._take_plan(event, now_ms)
            case ReschedulerChanged(is_on):
                return self._leave_balancing(is_on, now_ms)
            case PeersChanged(instance_ids):
                alive = instance_ids | {self._instance_id}
                if alive == self._alive:
                    return ()
                self._alive = alive
                return self._use_layout(now_ms)
            case Heard(peer, message, capacity):
                agent = self._made_agent()
                return self._ordered(agent, agent.receive(peer, message, capacity, now_ms))
            case MoveEnded(order_id, moved, reason):
                agent, request_id = self._moving.pop(order_id)
                return self._ordered(agent, agent.migration_ended(request_id, moved, reason, now_ms))
            case PeerLost(peer, capacity) if self.agent is not None:
                return self._ordered(self.agent, self.agent.peer_lost(peer, capacity, now_ms))
            case Tick(capacity, running, ended) if self.agent is not None:
                instructions: list[AgentInstruction] = []
                for request_id in ended:
                    instructions += self.agent.request_ended(request_id, now_ms)
                instructions += self.agent.tick(capacity, running, now_ms)
                return self._ordered(self.agent, tuple(instructions))
        return ()

    def _take_plan(self, plan: PlanChanged, now_ms: float) -> tuple[StageInstruction, ...]:
        if plan.layout is None:
            self._plan = None
        else:
            former = None if self._plan is None else self._parameters
            self._plan = plan
            if self._parameters != former:
                self.agent = None
        return self._use_layout(now_ms)

    def _leave_balancing(self, is_left: bool, now_ms: float) -> tuple[StageInstruction, ...]:
        former = self._parameters
        self.is_rescheduled = is_left
        if self._plan is None or self._parameters == former:
            return ()
        self.agent = None
        return self._use_layout(now_ms)

    @property
    def _parameters(self) -> StageParameters:
        """Of an agent that is made now."""
        parameters = StageParameters() if self._plan is None else self._plan.parameters
        return msgspec.structs.replace(parameters, rebalance=parameters.rebalance and not self.is_rescheduled)

    def _use_layout(self, now_ms: float) -> tuple[StageInstruction, ...]:
        """The plan without the instances that are not there."""
        plan = self._plan
        if plan is None and self.agent is None:
            return ()
        agent = self._made_agent()
        layout = None if plan is None or plan.layout is None else plan.layout.covering(self._alive)
        instructions = self._ordered(
            agent, agent.use_layout(layout, None if plan is None else plan.quality_model, now_ms)
        )
        if agent.stage == self.stage:
            return instructions
        self.stage = agent.stage
        return (*instructions, StageChanged(agent.stage))

    def _made_agent(self) -> StageAgent:
        if self.agent is None:
            # A fresh name, so that no deal of an agent before is mistaken for one of this.
            name = f"{self._incarnation_id}-{next(self._numbers)}"
            self.agent = StageAgent(self._instance_id, name, self._parameters, self._limits)
        return self.agent

    def _ordered(self, agent: StageAgent, instructions: tuple[AgentInstruction, ...]) -> tuple[StageInstruction, ...]:
        """With an id for each migration, by which its end is known: a former agent may have moved the same request."""
        found: list[StageInstruction] = []
        for instruction in instructions:
            if isinstance(instruction, Migrate):
                order_id = f"{agent.name}/{instruction.request_id}"
                assert order_id not in self._moving, f"{order_id} is under way already"
                self._moving[order_id] = (agent, instruction.request_id)
                found.append(MoveRequest(order_id, instruction.request_id, instruction.instance_id))
            else:
                found.append(instruction)
        return tuple(found)
