"""The rescheduler above its decisions: configuration, fallbacks, and the orders from the moment they are given. Pure.

The scheduler's shell and the simulator's feed the same events and carry out the same instructions. A decision is an
instruction of its own because it takes milliseconds with hundreds of instances: the shell makes it where it delays
nobody, and what comes back may be void by then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from controlplane.model.migration_order import MigrationOrder
from controlplane.policies.rescheduling.migrations import Migrations, OrderedMigration
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import Balance, DecodeInstance, Idle, Rescheduling
from controlplane.policies.rescheduling.stages import together
from controlplane.policies.rescheduling.switch import Decider, Fallback, ReschedulerSwitch
from controlplane.policies.rescheduling.view import DecodeView, ModelReport, decode_view
from mesh.invariants import invariants


@dataclass(frozen=True, slots=True)
class Configured:
    """Operators want this from now on; what was decided by another configuration is void."""

    mode: ReschedulerMode
    parameters: ReschedulerParameters


@dataclass(frozen=True, slots=True, eq=False)
class IntervalPassed:
    """It is time to decide again; comes every `ReschedulerParameters.interval_s`."""

    models: Mapping[str, ModelReport]


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """A decision that `Decide` asked for has been made."""

    decision_id: int
    rescheduling: Rescheduling
    alive: frozenset[str]
    """Instances that are there now, and not only when the decision was begun."""
    may_order: bool = True
    """Whether this process leads, and so may give orders."""
    unix_ms: int = 0
    """Wall clock, for people."""


@dataclass(frozen=True, slots=True, eq=False)
class OrderEnded:
    """The source of an order has said how it went, or could not be asked; comes once for each."""

    ordered: OrderedMigration
    moved: bool
    message: str = ""
    """Why the request stayed."""
    paused_ms: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Decide:
    """Call `decide` and answer with `Decided`."""

    decision_id: int
    model: str
    rescheduler: Decider
    instances: Sequence[DecodeInstance]
    moving: Sequence[MigrationOrder]
    held: frozenset[str]
    unreachable: Mapping[str, frozenset[str]]
    left: Mapping[str, frozenset[str]]

    def decide(self) -> Rescheduling:
        """Takes milliseconds, and needs nothing but this value."""
        stages = {each.stage for each in self.instances}
        if len(stages) <= 1:
            return self._among(self.instances)
        of_stages = [[each for each in self.instances if each.stage == stage] for stage in stages]
        most = self.rescheduler.parameters.migrations
        return together([(len(of_stage), self._among(of_stage)) for of_stage in of_stages], most)

    def _among(self, instances: Sequence[DecodeInstance]) -> Rescheduling:
        return self.rescheduler.decide(instances, self.moving, self.held, self.unreachable, self.left)


@dataclass(frozen=True, slots=True, eq=False)
class GiveOrder:
    """Have the source migrate the request; answer with `OrderEnded`."""

    ordered: OrderedMigration


@dataclass(frozen=True, slots=True)
class FallbackChanged:
    """Another mode stands in for the configured one, or, None, none does any more."""

    model: str
    fallback: Fallback | None


@dataclass(frozen=True, slots=True)
class BalanceChanged:
    """How evenly a model's load lies, as of this interval; None: there is nothing to compare any more."""

    model: str
    balance: Balance | None


ReschedulingEvent: TypeAlias = Configured | IntervalPassed | Decided | OrderEnded
ReschedulingInstruction: TypeAlias = Decide | GiveOrder | FallbackChanged | BalanceChanged


class ReschedulingManager:
    """Feed every event to `handle` and carry out what comes back, in order. Times are seconds on the holder's clock."""

    def __init__(self, mode: ReschedulerMode, max_in_flight: int, max_remembered: int) -> None:
        """`max_in_flight` orders at once; the last `max_remembered` are kept for people to look at."""
        self.switch = ReschedulerSwitch(mode)
        self.migrations = Migrations(max_in_flight, max_remembered)
        self.balances: dict[str, Balance] = {}
        """By model, as of the last interval."""
        self.views: dict[str, DecodeView] = {}
        """By model, what the last interval was decided from."""
        self.idle: dict[str, Idle] = {}
        """By model, why the last interval ended without an order."""
        self._deciding: dict[int, str] = {}
        """Model of each decision that is awaited."""
        self._numbers = count(1)

    def handle(self, event: ReschedulingEvent, now_s: float) -> tuple[ReschedulingInstruction, ...]:
        """Take in an event. Raises `IllegalTransition` for an order that has ended before."""
        match event:
            case Configured(mode, parameters):
                if self.switch.configure(mode, parameters):
                    self.balances.clear()
                    self.idle.clear()
                    self.views.clear()
                    self._deciding.clear()
                return ()
            case IntervalPassed():
                return self._begin(event, now_s)
            case Decided():
                return self._decided(event, now_s)
            case OrderEnded(ordered, moved, message, paused_ms):
                self.migrations.end(ordered, moved=moved, message=message, paused_ms=paused_ms, now_s=now_s)
                return ()

    @invariants
    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        self.migrations.validate()
        models = list(self._deciding.values())
        assert len(set(models)) == len(models), f"one decision at a time for each model, {models} are awaited"
        assert set(models) <= self.views.keys(), "what is decided was seen"
        assert self.balances.keys() <= self.views.keys(), "balances are of models that were seen"
        assert self.idle.keys() <= self.views.keys(), "so is what keeps still"
        assert self.switch.mode is not ReschedulerMode.OFF or not self.switch.fallbacks, "nothing stands in for off"

    def _begin(self, event: IntervalPassed, now_s: float) -> tuple[ReschedulingInstruction, ...]:
        self._deciding.clear()  # a shell that was so slow is told nothing by what it knew then
        if self.switch.mode is ReschedulerMode.OFF:
            return ()
        heard_s = {each.instance_id: each.heard_s for report in event.models.values() for each in report.instances}
        self.migrations.settle(heard_s.get, now_s)
        self.migrations.keep(_running(event.models.values()), now_s)
        shunned, held = self.migrations.shunned_targets(now_s), self.migrations.held_requests(now_s)
        instructions: list[ReschedulingInstruction] = []
        for model in [each for each in self.views if each not in event.models]:
            del self.views[model]
            self.idle.pop(model, None)
            if self.balances.pop(model, None) is not None:
                instructions.append(BalanceChanged(model, None))
        for model, report in event.models.items():
            view = decode_view(model, report.instances, self.switch.parameters, shunned, now_s)
            self.views[model] = view
            rescheduler, changed = self.switch.rescheduler(view)
            if changed:
                instructions.append(FallbackChanged(model, self.switch.fallbacks.get(model)))
            number = next(self._numbers)
            self._deciding[number] = model
            moving, left = self.migrations.moving(), self.migrations.left()
            instructions.append(
                Decide(number, model, rescheduler, view.instances, moving, held, report.unreachable, left)
            )
        return tuple(instructions)

    def _decided(self, event: Decided, now_s: float) -> tuple[ReschedulingInstruction, ...]:
        model = self._deciding.pop(event.decision_id, None)
        if model is None:
            return ()  # the configuration has changed meanwhile
        rescheduling = event.rescheduling
        if rescheduling.idle is None:
            self.idle.pop(model, None)
        else:
            self.idle[model] = rescheduling.idle
        instructions: list[ReschedulingInstruction] = []
        if rescheduling.balance is not None:
            self.balances[model] = rescheduling.balance
            instructions.append(BalanceChanged(model, rescheduling.balance))
        elif self.balances.pop(model, None) is not None:
            instructions.append(BalanceChanged(model, None))
        if event.may_order:
            for order in rescheduling.orders[: max(0, self.migrations.room)]:
                if order.source_instance_id not in event.alive or order.request_id in self.migrations:
                    continue  # gone meanwhile; or two instances have told of it, which are handing it over
                instructions.append(GiveOrder(self.migrations.begin(order, now_s, event.unix_ms)))
        return tuple(instructions)


def _running(reports: Iterable[ModelReport]) -> set[str]:
    """All requests that instances tell of."""
    loads = (each.load for report in reports for each in report.instances)
    return {request_id for load in loads if load is not None for request_id in load.request_ids}
