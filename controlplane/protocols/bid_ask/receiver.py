"""The side that takes requests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
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

THROUGHPUT_WEIGHT = 0.3
"""Of the newest transfer in the moving average."""


class EntryState(StrEnum):
    """Where a request that is promised to this instance stands."""

    QUEUED = "queued"
    READY = "ready"
    """The sender has been told to begin; a slot is held."""
    WAITING = "waiting"
    """It starved; the sender begins it next, a slot is held."""
    RECEIVING = "receiving"
    """It is being transferred."""
    RECEIVED = "received"
    DROPPED = "dropped"


TRANSITIONS: dict[EntryState, frozenset[EntryState]] = {
    EntryState.QUEUED: frozenset({EntryState.READY, EntryState.WAITING, EntryState.DROPPED}),
    EntryState.READY: frozenset({EntryState.QUEUED, EntryState.RECEIVING, EntryState.RECEIVED, EntryState.DROPPED}),
    EntryState.WAITING: frozenset({EntryState.RECEIVING, EntryState.RECEIVED, EntryState.DROPPED}),
    EntryState.RECEIVING: frozenset({EntryState.RECEIVED, EntryState.DROPPED}),
    EntryState.RECEIVED: frozenset(),
    EntryState.DROPPED: frozenset(),
}
HOLDING = frozenset({EntryState.READY, EntryState.WAITING, EntryState.RECEIVING})
"""A slot is held."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """This instance at the moment, as far as taking requests goes."""

    load_tokens: int
    """Context of all requests that run or are queued here."""
    idle_tokens: int
    """KV memory that nobody uses."""
    accepts: bool = True
    """False while it drains or its engine hangs."""
    transfer_obstacle: str = ""
    """Why KV can be moved neither to nor from here, although the engine could; empty if it can."""
    frontends: frozenset[str] | None = None
    """Frontends that are connected to this instance; None: all are, as in a simulation without frontends."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to another instance."""

    instance_id: str
    message: ToSender


@dataclass(slots=True)
class _Entry:
    ask_id: str
    request_id: str
    sender: str
    context_tokens: int
    frontend_id: str
    awarded_ms: float
    """When the award came."""
    state: EntryState = EntryState.QUEUED
    attempts: int = 0
    sent_ms: float = 0.0
    begun_ms: float = 0.0
    not_before_ms: float = 0.0
    story: list[str] = field(default_factory=list)


Sends: TypeAlias = tuple[Send, ...]


class BidAskReceiver:
    """All that is promised to one instance. Carry out what the methods return, in order."""

    def __init__(self, limits: BidAskLimits) -> None:
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        """By ask id; open ones only."""
        self._sender_load_tokens: dict[str, int] = {}
        """As last heard, of senders with entries here."""
        self.throughput_tokens_s = limits.throughput_tokens_s
        """Of transfers to here, as measured."""
        self.received = 0

    @property
    def promised_tokens(self) -> int:
        """Context of all requests promised to this instance that are not here yet."""
        return sum(entry.context_tokens for entry in self._entries.values())

    @property
    def holding(self) -> int:
        """Slots that are held: transfers that run or may run."""
        return sum(entry.state in HOLDING for entry in self._entries.values())

    @property
    def senders(self) -> frozenset[str]:
        """Instances that have promised a request which is not here yet."""
        return frozenset(entry.sender for entry in self._entries.values())

    def state_of(self, ask_id: str) -> EntryState | None:
        """State of a promise by its ask id; None where it is closed or never came."""
        entry = self._entries.get(ask_id)
        return None if entry is None else entry.state

    def request_of(self, ask_id: str) -> str | None:
        """The request of an open entry."""
        entry = self._entries.get(ask_id)
        return None if entry is None else entry.request_id

    def receive(self, instance_id: str, message: ToReceiver, capacity: Capacity, now_ms: float) -> Sends:
        """A message from a sender."""
        if isinstance(message, Ask):
            return self._bid(instance_id, message, capacity)
        if isinstance(message, Award):
            answer = self._take(instance_id, message, capacity, now_ms)
            return (*answer, *self._pump(capacity, now_ms))
        entry = self._entries.get(message.ask_id)
        if entry is not None and entry.sender == instance_id:
            handler: Callable[[_Entry, ToReceiver, float], None] = _MESSAGES[type(message)].__get__(self)
            handler(entry, message, now_ms)
        return self._pump(capacity, now_ms)

    def lost(self, instance_id: str, capacity: Capacity, now_ms: float) -> Sends:
        """The sender's process is gone; a migration from it ends by itself."""
        for entry in [entry for entry in self._entries.values() if entry.sender == instance_id]:
            self._close(entry, EntryState.DROPPED, now_ms)
        return self._pump(capacity, now_ms)

    def tick(self, capacity: Capacity, now_ms: float) -> Sends:
        """Time has passed: drop what is overdue, ask again, and attempt what is queued."""
        limits = self._limits
        sends: list[Send] = []
        for entry in list(self._entries.values()):
            if now_ms - entry.awarded_ms >= limits.promise_ms + limits.transfer_ms:
                self._close(entry, EntryState.DROPPED, now_ms)
            elif entry.state in HOLDING:
                receiving = entry.state is EntryState.RECEIVING
                if now_ms - entry.sent_ms >= (limits.probe_ms if receiving else limits.resend_ms):
                    sends.append(self._claim(entry, now_ms))
        return (*sends, *self._pump(capacity, now_ms))

    # -- messages

    def _bid(self, sender: str, ask: Ask, capacity: Capacity) -> Sends:
        if sender in self.senders:
            self._sender_load_tokens[sender] = ask.sender_load_tokens
        reason = self._obstacle(ask.context_tokens, ask.frontend_id, self.promised_tokens, capacity)
        if reason:
            return (Send(sender, Pass(ask.ask_id, reason)),)
        earliest_start_ms = 1000 * self.promised_tokens / self.throughput_tokens_s
        return (Send(sender, Bid(ask.ask_id, capacity.load_tokens + self.promised_tokens, earliest_start_ms)),)

    def _take(self, sender: str, award: Award, capacity: Capacity, now_ms: float) -> Sends:
        known = self._entries.get(award.ask_id)
        if known is None:
            reason = self._obstacle(award.context_tokens, award.frontend_id, self.promised_tokens, capacity)
            if reason:
                return (Send(sender, Refused(award.ask_id, reason)),)
            entry = _Entry(award.ask_id, award.request_id, sender, award.context_tokens, award.frontend_id, now_ms)
            entry.story.append(f"{now_ms:.0f} ms: promised by {sender}")
            self._entries[award.ask_id] = entry
        self._sender_load_tokens[sender] = award.sender_load_tokens
        return (Send(sender, Accepted(award.ask_id)),)

    def _on_begun(self, entry: _Entry, message: Begun, now_ms: float) -> None:
        if entry.state in (EntryState.READY, EntryState.WAITING):
            self._enter(entry, EntryState.RECEIVING, now_ms)
            entry.begun_ms = now_ms

    def _on_busy(self, entry: _Entry, message: Busy, now_ms: float) -> None:
        if entry.state is EntryState.READY and message.attempt == entry.attempts:
            self._enter(entry, EntryState.QUEUED, now_ms)
            entry.not_before_ms = now_ms + self._limits.retry_ms

    def _on_withdrawn(self, entry: _Entry, message: Withdrawn, now_ms: float) -> None:
        self._close(entry, EntryState.DROPPED, now_ms)

    def _on_done(self, entry: _Entry, message: Done, now_ms: float) -> None:
        if not message.moved or entry.state is EntryState.QUEUED:
            # Queued: the award was doubled and came again after all was over.
            self._close(entry, EntryState.DROPPED, now_ms)
            return
        if entry.state is EntryState.RECEIVING and now_ms > entry.begun_ms:
            measured = 1000 * entry.context_tokens / (now_ms - entry.begun_ms)
            self.throughput_tokens_s += THROUGHPUT_WEIGHT * (measured - self.throughput_tokens_s)
        self.received += 1
        self._close(entry, EntryState.RECEIVED, now_ms)

    # -- steps

    def _pump(self, capacity: Capacity, now_ms: float) -> Sends:
        """Attempt the queued requests, those of the most loaded sender first, while slots are free."""
        sends: list[Send] = []
        due = [e for e in self._entries.values() if e.state is EntryState.QUEUED and now_ms >= e.not_before_ms]
        due.sort(key=lambda entry: -self._sender_load_tokens[entry.sender])
        coming = sum(entry.context_tokens for entry in self._entries.values() if entry.state in HOLDING)
        busy = {entry.sender for entry in self._entries.values() if entry.state in HOLDING}
        for entry in due:
            if self.holding >= self._limits.incoming:
                break
            if entry.sender in busy:
                # With a request for this instance, as is known here: skipped without an attempt.
                continue
            if reason := self._obstacle(entry.context_tokens, entry.frontend_id, coming, capacity, is_queued=True):
                self._close(entry, EntryState.DROPPED, now_ms)
                sends.append(Send(entry.sender, Refused(entry.ask_id, reason)))
                continue
            entry.attempts += 1
            starves = entry.attempts > self._limits.starving_after
            self._enter(entry, EntryState.WAITING if starves else EntryState.READY, now_ms)
            sends.append(self._claim(entry, now_ms))
            busy.add(entry.sender)
            coming += entry.context_tokens
        return tuple(sends)

    def _claim(self, entry: _Entry, now_ms: float) -> Send:
        entry.sent_ms = now_ms
        kind = Starving if entry.state is EntryState.WAITING else Ready
        return Send(entry.sender, kind(entry.ask_id, entry.attempts))

    def _obstacle(
        self,
        context_tokens: int,
        frontend_id: str,
        reserved_tokens: int,
        capacity: Capacity,
        *,
        is_queued: bool = False,
    ) -> str:
        """Why the request cannot be taken; empty if it can."""
        if not capacity.accepts:
            return "the instance takes nothing new"
        if capacity.transfer_obstacle:
            return f"no request can be moved to it: {capacity.transfer_obstacle}"
        if frontend_id and capacity.frontends is not None and frontend_id not in capacity.frontends:
            return f"unreachable: frontend {frontend_id} has no stream to it"
        if not is_queued and len(self._entries) >= self._limits.queued:
            return f"{len(self._entries)} requests are promised to it already"
        if context_tokens + reserved_tokens > capacity.idle_tokens:
            return f"no idle cache: {context_tokens} tokens needed, {capacity.idle_tokens - reserved_tokens} idle"
        return ""

    @invariants
    def validate(self) -> None:
        """Check what must hold between two calls. Raises `InvariantBroken`."""
        assert len(self._entries) <= self._limits.queued, (
            f"{len(self._entries)} promises, {self._limits.queued} at most"
        )
        assert self.holding <= self._limits.incoming, f"{self.holding} slots held, {self._limits.incoming} at most"
        assert self._sender_load_tokens.keys() == self.senders, "loads are kept of those who have promised something"
        for ask_id, entry in self._entries.items():
            assert ask_id == entry.ask_id, f"promise {entry.ask_id} is kept as {ask_id}"
            assert TRANSITIONS[entry.state], f"promise {ask_id} is {entry.state} and still kept; {entry.story}"
        assert self.throughput_tokens_s > 0, "the throughput of transfers is never 0"

    def _close(self, entry: _Entry, state: EntryState, now_ms: float) -> None:
        self._enter(entry, state, now_ms)
        del self._entries[entry.ask_id]
        if entry.sender not in self.senders:
            self._sender_load_tokens.pop(entry.sender, None)

    def _enter(self, entry: _Entry, state: EntryState, now_ms: float) -> None:
        if state not in TRANSITIONS[entry.state]:
            story = "; ".join(entry.story)
            raise IllegalTransition(f"promise {entry.ask_id}: {entry.state} cannot become {state}; {story}")
        entry.state = state
        entry.story.append(f"{now_ms:.0f} ms: {state}")


_MESSAGES: dict[type, Callable[..., None]] = {
    Begun: BidAskReceiver._on_begun,
    Busy: BidAskReceiver._on_busy,
    Withdrawn: BidAskReceiver._on_withdrawn,
    Done: BidAskReceiver._on_done,
}
