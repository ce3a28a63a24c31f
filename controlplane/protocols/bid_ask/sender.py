"""The side that has requests to hand off."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import TypeAlias

from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import (
    Accepted,
    Ask,
    Award,
    Begun,
    Bid,
    Busy,
    Done,
    Pass,
    Ready,
    Refused,
    Starving,
    ToReceiver,
    ToSender,
    Withdrawn,
)
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


@dataclass(frozen=True, slots=True)
class Offer:
    """A bid, as the sender holds it."""

    instance_id: str
    load_tokens: int
    earliest_start_ms: float


def choose(offers: Sequence[Offer], earliest: int) -> Offer | None:
    """The winner of bids in the order of their arrival; None without any.

    Of n bids the n // 2 with the higher loads go (of one, none), then all but the `earliest` ones; of the rest the
    one that came first wins. Equal loads and starts are told apart by their arrival.
    """
    arrival = {offer.instance_id: number for number, offer in enumerate(offers)}
    light = sorted(offers, key=lambda offer: (offer.load_tokens, arrival[offer.instance_id]))
    light = light[: len(light) - len(light) // 2]
    early = sorted(light, key=lambda offer: (offer.earliest_start_ms, arrival[offer.instance_id]))[:earliest]
    return min(early, key=lambda offer: arrival[offer.instance_id], default=None)


class DealState(StrEnum):
    """Where the handoff of one request stands."""

    ASKING = "asking"
    """Candidates have been asked; nothing is promised."""
    AWARDING = "awarding"
    """Promised to one receiver, which has not been heard to accept."""
    PROMISED = "promised"
    """Accepted; the receiver says when."""
    MOVING = "moving"
    """The live migration runs."""
    MOVED = "moved"
    KEPT = "kept"
    """The request stays, or has ended."""


TRANSITIONS: dict[DealState, frozenset[DealState]] = {
    DealState.ASKING: frozenset({DealState.AWARDING, DealState.KEPT}),
    DealState.AWARDING: frozenset({DealState.PROMISED, DealState.MOVING, DealState.KEPT}),
    DealState.PROMISED: frozenset({DealState.MOVING, DealState.KEPT}),
    DealState.MOVING: frozenset({DealState.MOVED, DealState.KEPT}),
    DealState.MOVED: frozenset(),
    DealState.KEPT: frozenset(),
}
PROMISING = frozenset({DealState.AWARDING, DealState.PROMISED})


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """It finished, or is gone from this instance otherwise."""

    request_id: str


@dataclass(frozen=True, slots=True)
class MigrationEnded:
    """What `Migrate` ordered is over; comes once for each order, within `transfer_ms`."""

    request_id: str
    moved: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The instance has died or can be heard no more: its bids and promises to it are void."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: choose among the bids, ask again, or give up what is overdue."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to another instance."""

    instance_id: str
    message: ToReceiver


@dataclass(frozen=True, slots=True)
class Migrate:
    """Start the live migration of the request; tell `MigrationEnded` when it is over."""

    request_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Closed:
    """For the record: the deal is over; `instance_id` is empty where nobody had been chosen."""

    request_id: str
    instance_id: str
    moved: bool
    reason: str


SenderEvent: TypeAlias = RequestEnded | MigrationEnded | PeerLost | Tick
SenderInstruction: TypeAlias = Send | Migrate | Closed


@dataclass(slots=True)
class _Deal:
    ask_id: str
    request_id: str
    context_tokens: int
    frontend_id: str
    asked_ms: float
    ceiling_tokens: int | None
    unanswered: dict[str, None]
    """Candidates that have said nothing yet, in the order in which they were asked."""
    offers: list[Offer] = field(default_factory=list)
    state: DealState = DealState.ASKING
    receiver: str = ""
    awarded_ms: float = 0.0
    sent_ms: float = 0.0
    busy_attempt: int = 0
    """The highest attempt that was answered Busy."""
    story: list[str] = field(default_factory=list)


class BidAskSender:
    """All deals of one instance as a sender. Carry out what the methods return, in order."""

    def __init__(self, name: str, limits: BidAskLimits) -> None:
        """`name` is part of every ask id: the incarnation, so that no two lives of an instance share one."""
        self._name = name
        self._limits = limits
        self._numbers = count(1)
        self._deals: dict[str, _Deal] = {}
        """By ask id; open ones only."""
        self._by_request: dict[str, _Deal] = {}
        self._starving: deque[str] = deque()
        """Ask ids whose transfer begins next, first come first served."""

    @property
    def load_tokens(self) -> int:
        """Context of all requests on offer."""
        return sum(deal.context_tokens for deal in self._deals.values())

    @property
    def moving(self) -> int:
        """How many transfers from here run; at most `BidAskLimits.outgoing`."""
        return sum(deal.state is DealState.MOVING for deal in self._deals.values())

    @property
    def has_room(self) -> bool:
        return len(self._deals) < self._limits.deals

    @property
    def offered(self) -> tuple[str, ...]:
        """Requests with an open deal."""
        return tuple(self._by_request)

    def state_of(self, request_id: str) -> DealState | None:
        """Of its open deal; None if it has none."""
        deal = self._by_request.get(request_id)
        return None if deal is None else deal.state

    def promised_to(self, request_id: str) -> str | None:
        """Who may have the request: at most one."""
        deal = self._by_request.get(request_id)
        return deal.receiver if deal is not None and deal.receiver else None

    def offer(
        self,
        request_id: str,
        context_tokens: int,
        candidates: Sequence[str],
        now_ms: float,
        *,
        ceiling_tokens: int | None = None,
        frontend_id: str = "",
    ) -> tuple[SenderInstruction, ...]:
        """Find a taker for a request of this frontend.

        Bids of more than `ceiling_tokens` of load do not count. Nothing happens without candidates or room, or while
        the request is on offer already.
        """
        if not candidates or not self.has_room or request_id in self._by_request:
            return ()
        ask_id = f"{self._name}-{next(self._numbers)}"
        deal = _Deal(ask_id, request_id, context_tokens, frontend_id, now_ms, ceiling_tokens, dict.fromkeys(candidates))
        deal.sent_ms = now_ms
        deal.story.append(f"{now_ms:.0f} ms: asked {', '.join(candidates)}")
        self._deals[ask_id] = self._by_request[request_id] = deal
        return tuple(Send(candidate, self._ask(deal)) for candidate in candidates)

    def receive(self, instance_id: str, message: ToSender, now_ms: float) -> tuple[SenderInstruction, ...]:
        """A message from a receiver."""
        deal = self._deals.get(message.ask_id)
        if deal is None:
            if isinstance(message, (Accepted, Ready, Starving)):
                return (Send(instance_id, Withdrawn(message.ask_id, "it is not on offer (any more)")),)
            return ()
        if isinstance(message, (Bid, Pass)):
            return self._answered(deal, instance_id, message, now_ms)
        if deal.receiver != instance_id:
            # Only the receiver of the award has reason to speak; a restarted peer may remember otherwise.
            return (Send(instance_id, Withdrawn(message.ask_id, "it is promised to somebody else")),)
        handler: Callable[[_Deal, ToSender, float], tuple[SenderInstruction, ...]] = _MESSAGES[type(message)].__get__(
            self
        )
        return handler(deal, message, now_ms)

    def handle(self, event: SenderEvent, now_ms: float) -> tuple[SenderInstruction, ...]:
        """An event that is no message from a receiver."""
        match event:
            case RequestEnded(request_id):
                deal = self._by_request.get(request_id)
                if deal is None or deal.state is DealState.MOVING:
                    return ()
                return self._keep(deal, "the request ended", now_ms)
            case MigrationEnded():
                return self._migrated(event, now_ms)
            case PeerLost(instance_id):
                return self._lost(instance_id, now_ms)
            case Tick():
                return self._tick(now_ms)

    # -- messages

    def _answered(
        self, deal: _Deal, instance_id: str, message: Bid | Pass, now_ms: float
    ) -> tuple[SenderInstruction, ...]:
        if deal.state is not DealState.ASKING or instance_id not in deal.unanswered:
            return ()
        del deal.unanswered[instance_id]
        if isinstance(message, Bid) and (deal.ceiling_tokens is None or message.load_tokens <= deal.ceiling_tokens):
            deal.offers.append(Offer(instance_id, message.load_tokens, message.earliest_start_ms))
        return () if deal.unanswered else self._choose(deal, now_ms)

    def _on_accepted(self, deal: _Deal, message: Accepted, now_ms: float) -> tuple[SenderInstruction, ...]:
        if deal.state is DealState.AWARDING:
            self._enter(deal, DealState.PROMISED, now_ms)
        return ()

    def _on_refused(self, deal: _Deal, message: Refused, now_ms: float) -> tuple[SenderInstruction, ...]:
        if deal.state is DealState.MOVING:
            return ()
        return self._keep(deal, message.reason, now_ms, tell=False)

    def _on_ready(self, deal: _Deal, message: Ready, now_ms: float) -> tuple[SenderInstruction, ...]:
        if deal.state is DealState.MOVING:
            return (Send(deal.receiver, Begun(deal.ask_id)),)
        if message.attempt <= deal.busy_attempt:
            return (Send(deal.receiver, Busy(deal.ask_id, message.attempt)),)
        if self._may_begin(deal, now_ms):
            return self._begin(deal, now_ms)
        deal.busy_attempt = message.attempt
        if deal.state is DealState.AWARDING:
            self._enter(deal, DealState.PROMISED, now_ms)
        return (Send(deal.receiver, Busy(deal.ask_id, message.attempt)),)

    def _on_starving(self, deal: _Deal, message: Starving, now_ms: float) -> tuple[SenderInstruction, ...]:
        if deal.state is DealState.MOVING:
            return (Send(deal.receiver, Begun(deal.ask_id)),)
        if self._may_begin(deal, now_ms):
            return self._begin(deal, now_ms)
        if deal.state is DealState.AWARDING:
            self._enter(deal, DealState.PROMISED, now_ms)
        if deal.ask_id not in self._starving:
            self._starving.append(deal.ask_id)
        return ()

    # -- events

    def _migrated(self, event: MigrationEnded, now_ms: float) -> tuple[SenderInstruction, ...]:
        deal = self._by_request.get(event.request_id)
        if deal is None or deal.state is not DealState.MOVING:
            return ()
        receiver = deal.receiver
        self._close(deal, DealState.MOVED if event.moved else DealState.KEPT, now_ms)
        done = Send(receiver, Done(deal.ask_id, event.moved))
        closed = Closed(deal.request_id, receiver, event.moved, event.reason)
        return (done, closed, *self._begin_next(now_ms))

    def _begin_next(self, now_ms: float) -> tuple[SenderInstruction, ...]:
        """The starving come before anybody else."""
        while self._starving:
            deal = self._deals[self._starving[0]]
            if self.moving >= self._limits.outgoing:
                return ()
            if self._may_begin(deal, now_ms):
                return self._begin(deal, now_ms)
            self._starving.popleft()
        return ()

    def _lost(self, instance_id: str, now_ms: float) -> tuple[SenderInstruction, ...]:
        instructions: list[SenderInstruction] = []
        for deal in list(self._deals.values()):
            if deal.state is DealState.ASKING:
                deal.offers = [offer for offer in deal.offers if offer.instance_id != instance_id]
                if instance_id in deal.unanswered:
                    del deal.unanswered[instance_id]
                if not deal.unanswered:
                    instructions += self._choose(deal, now_ms)
            elif deal.receiver == instance_id and deal.state in PROMISING:
                instructions += self._keep(deal, "the receiver is gone", now_ms, tell=False)
        return tuple(instructions)

    def _tick(self, now_ms: float) -> tuple[SenderInstruction, ...]:
        instructions: list[SenderInstruction] = []
        for deal in list(self._deals.values()):
            instructions += self._age(deal, now_ms)
        return tuple(instructions)

    def _age(self, deal: _Deal, now_ms: float) -> tuple[SenderInstruction, ...]:
        limits = self._limits
        match deal.state:
            case DealState.ASKING if now_ms - deal.asked_ms >= limits.bids_ms:
                return self._choose(deal, now_ms)
            case DealState.AWARDING if now_ms - deal.awarded_ms >= limits.award_ms:
                return self._keep(deal, "the receiver did not answer the award", now_ms)
            case DealState.AWARDING if now_ms - deal.sent_ms >= limits.resend_ms:
                deal.sent_ms = now_ms
                return (Send(deal.receiver, self._award(deal)),)
            case DealState.PROMISED if now_ms - deal.awarded_ms >= limits.promise_ms:
                return self._keep(deal, "the receiver had no slot for it in time", now_ms)
        return ()

    # -- steps

    def _choose(self, deal: _Deal, now_ms: float) -> tuple[SenderInstruction, ...]:
        winner = choose(deal.offers, self._limits.earliest)
        if winner is None:
            return self._keep(deal, "nobody can take it", now_ms)
        deal.receiver, deal.awarded_ms, deal.sent_ms = winner.instance_id, now_ms, now_ms
        self._enter(deal, DealState.AWARDING, now_ms)
        return (Send(deal.receiver, self._award(deal)),)

    def _may_begin(self, deal: _Deal, now_ms: float) -> bool:
        in_time = now_ms - deal.awarded_ms < self._limits.promise_ms
        turn = not self._starving or self._starving[0] == deal.ask_id
        return in_time and turn and self.moving < self._limits.outgoing

    def _begin(self, deal: _Deal, now_ms: float) -> tuple[SenderInstruction, ...]:
        self._enter(deal, DealState.MOVING, now_ms)
        self._forget_starving(deal)
        return (Send(deal.receiver, Begun(deal.ask_id)), Migrate(deal.request_id, deal.receiver))

    def _keep(self, deal: _Deal, reason: str, now_ms: float, *, tell: bool = True) -> tuple[SenderInstruction, ...]:
        was_promised = deal.state in PROMISING
        self._close(deal, DealState.KEPT, now_ms)
        instructions: list[SenderInstruction] = [Closed(deal.request_id, deal.receiver, False, reason)]
        if was_promised and tell:
            instructions.insert(0, Send(deal.receiver, Withdrawn(deal.ask_id, reason)))
        return (*instructions, *self._begin_next(now_ms))

    @invariants
    def validate(self) -> None:
        """Check what must hold between two calls. Raises `InvariantBroken`."""
        limits = self._limits
        assert len(self._deals) <= limits.deals, f"{len(self._deals)} deals are open, {limits.deals} at most"
        assert self.moving <= limits.outgoing, f"{self.moving} transfers run, {limits.outgoing} at most"
        assert {deal.request_id: deal for deal in self._deals.values()} == self._by_request, "one deal for each request"
        assert set(self._starving) <= self._deals.keys(), "only open deals starve"
        assert len(set(self._starving)) == len(self._starving), "no deal starves twice"
        for deal in self._deals.values():
            assert TRANSITIONS[deal.state], f"deal {deal.ask_id} is {deal.state} and still kept; {deal.story}"
            assert bool(deal.receiver) == (deal.state is not DealState.ASKING), "promised to one once bids are in"

    def _close(self, deal: _Deal, state: DealState, now_ms: float) -> None:
        self._enter(deal, state, now_ms)
        self._forget_starving(deal)
        del self._deals[deal.ask_id], self._by_request[deal.request_id]

    def _forget_starving(self, deal: _Deal) -> None:
        if deal.ask_id in self._starving:
            self._starving.remove(deal.ask_id)

    def _enter(self, deal: _Deal, state: DealState, now_ms: float) -> None:
        if state not in TRANSITIONS[deal.state]:
            story = "; ".join(deal.story)
            raise IllegalTransition(
                f"deal {deal.ask_id} of {deal.request_id}: {deal.state} cannot become {state}; {story}"
            )
        deal.state = state
        deal.story.append(f"{now_ms:.0f} ms: {state} {deal.receiver}".rstrip())

    def _ask(self, deal: _Deal) -> Ask:
        return Ask(deal.ask_id, deal.request_id, deal.context_tokens, self.load_tokens, deal.frontend_id)

    def _award(self, deal: _Deal) -> Award:
        return Award(deal.ask_id, deal.request_id, deal.context_tokens, self.load_tokens, deal.frontend_id)


_MESSAGES: dict[type, Callable[..., tuple[SenderInstruction, ...]]] = {
    Accepted: BidAskSender._on_accepted,
    Refused: BidAskSender._on_refused,
    Ready: BidAskSender._on_ready,
    Starving: BidAskSender._on_starving,
}
