"""Pulls to one instance: which run, which wait, and what becomes of their requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from controlplane.protocols.prefix_pull.limits import PullLimits
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class PullState(StrEnum):
    """Where a pull stands."""

    QUEUED = "queued"
    """Others have their turn."""
    ASKING = "asking"
    """The source has been asked to hold the prefix."""
    FETCHING = "fetching"
    """Blocks are being copied."""
    STOPPING = "stopping"
    """It has failed, and its request is computed; the engine still has to say that nothing is copied any more."""
    ENDED = "ended"


TRANSITIONS: dict[PullState, frozenset[PullState]] = {
    PullState.QUEUED: frozenset({PullState.ASKING, PullState.ENDED}),
    PullState.ASKING: frozenset({PullState.FETCHING, PullState.ENDED}),
    PullState.FETCHING: frozenset({PullState.STOPPING, PullState.ENDED}),
    PullState.STOPPING: frozenset({PullState.ENDED}),
    PullState.ENDED: frozenset(),
}
RUNNING = frozenset({PullState.ASKING, PullState.FETCHING, PullState.STOPPING})


class PullOutcome(StrEnum):
    """How a pull ended. In all but the first the prefix is computed."""

    PULLED = "pulled"
    REFUSED = "refused"
    """By the source, which has none of the blocks or too much to do, or here, where too many wait."""
    LATE = "late"
    """Computing it would have been over by then."""
    FAILED = "failed"
    """The source was lost, or the blocks could not be copied."""
    CANCELLED = "cancelled"
    """Nobody wants the request any more."""


# Events


@dataclass(frozen=True, slots=True)
class PullOrdered:
    """A request is to begin with blocks that another instance has."""

    request_id: str
    source_id: str
    key: int
    """Names the prefix: the hash of its last block. Requests of one prefix share a pull."""
    blocks: int
    compute_ms: float
    """What it would take to compute them here."""
    comes_ms: float = 0.0
    """The source is computing them, for about so long."""


@dataclass(frozen=True, slots=True)
class PullFollowed:
    """A request that is to pull nothing begins with what a pull brings (`PullManager.bringing`): it waits for that
    too, for computed at once it would find none of it."""

    request_id: str
    pull_id: str


@dataclass(frozen=True, slots=True)
class Held:
    """The source holds this many leading blocks for the pull."""

    pull_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class NotHeld:
    """The source refuses, or its call ended: nothing is held (any more)."""

    pull_id: str
    reason: str
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """Engine: the blocks are in the prefix cache; `blocks` had to be copied."""

    pull_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class NotFetched:
    """Engine: they are not, and nothing is copied any more."""

    pull_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestGone:
    """Nobody wants the request any more; of one that is not waiting for a pull this says nothing."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ObstacleChanged:
    """Why no block can be copied to here now; empty if it can."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The instance ends: its requests are answered by others."""


PullEvent: TypeAlias = (
    PullOrdered | PullFollowed | Held | NotHeld | Fetched | NotFetched | RequestGone | ObstacleChanged | Tick | Stopped
)

# Instructions


@dataclass(frozen=True, slots=True)
class AskHold:
    """Ask the source to hold this many leading blocks of the request's prompt; answer Held or NotHeld, and NotHeld when
    the call ends by itself later."""

    pull_id: str
    source_id: str
    request_id: str
    blocks: int
    wait_ms: float
    """The source may wait so long for blocks that it is computing."""
    allowed_ms: float
    """The call's deadline."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Have the engine copy so many blocks; answer Fetched or NotFetched."""

    pull_id: str
    blocks: int
    allowed_ms: float


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Copy no more; the answer to Fetch is still awaited."""

    pull_id: str


@dataclass(frozen=True, slots=True)
class EndHold:
    """End the call to the source."""

    pull_id: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand the request to the engine, which finds in its prefix cache what came."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PullEnded:
    """For metrics and logs. The last that is said about the pull."""

    pull_id: str
    source_id: str
    outcome: PullOutcome
    reason: str
    blocks: int
    """Copied."""
    duration_ms: float
    """Since the order."""
    fetch_ms: float
    """Of copying alone; 0 if it did not come to that."""


PullInstruction: TypeAlias = AskHold | Fetch | CancelFetch | EndHold | Submit | PullEnded
_Instructions: TypeAlias = Iterator[PullInstruction]


@dataclass(slots=True, eq=False)
class _Pull:
    pull_id: str
    source_id: str
    key: int
    blocks: int
    compute_ms: float
    ordered_ms: float
    deadline_ms: float
    request_ids: list[str] = field(default_factory=list)
    """Those that wait for it; none once its failure is known."""
    state: PullState = PullState.QUEUED
    outcome: PullOutcome | None = None
    reason: str = ""
    fetch_began_ms: float = 0.0

    def become(self, state: PullState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"pull {self.pull_id} from {self.source_id} cannot go from {self.state} to {state}")
        self.state = state


class PullManager:
    """Feed events to `handle` and carry out what it returns, in order. Events may come late, twice or never: a pull
    that is not heard of ends at its deadline, and each ordered request is submitted exactly once unless it is gone.
    `Tick` is due every 50 ms or so while there are any `pulls`."""

    def __init__(self, name: str, limits: PullLimits | None = None) -> None:
        """`name`: no other instance, and no other life of this one, has it; pulls are named after it."""
        self.limits = limits or PullLimits()
        self._name = name
        self._ordered = 0
        self._pulls: dict[str, _Pull] = {}
        """By id, in the order of the orders; without those that have ended."""
        self._obstacle_reason = ""

    def handle(self, event: PullEvent, now_ms: float) -> tuple[PullInstruction, ...]:
        """What is to be done about `event`."""
        handler: Callable[[PullEvent, float], _Instructions] = _HANDLERS[type(event)].__get__(self)
        return (*handler(event, now_ms), *self._next(now_ms))

    @property
    def pulls(self) -> tuple[tuple[str, str, PullState], ...]:
        """(pull, source, state) of all that have not ended."""
        return tuple((pull.pull_id, pull.source_id, pull.state) for pull in self._pulls.values())

    @property
    def longest_blocks(self) -> int:
        """Of the prefixes that are being pulled, the length of the longest; 0: nothing is pulled."""
        return max((pull.blocks for pull in self._pulls.values() if pull.request_ids), default=0)

    def bringing(self, chain: Sequence[int]) -> str | None:
        """The pull that brings the beginning of a prompt, of several the longest; None: there is none. `chain`: hashes
        of the prompt's leading blocks."""
        brought = [
            pull
            for pull in self._pulls.values()
            if pull.request_ids and pull.blocks <= len(chain) and chain[pull.blocks - 1] == pull.key
        ]
        return max(brought, key=lambda pull: pull.blocks).pull_id if brought else None

    def waits(self, request_id: str) -> bool:
        """Whether the request waits for a pull."""
        return self._pull_of(request_id) is not None

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself or exceeds a bound."""
        states = [pull.state for pull in self._pulls.values()]
        assert sum(state in RUNNING for state in states) <= self.limits.parallel, "too many at once"
        assert states.count(PullState.QUEUED) <= self.limits.queued, "too many wait"
        is_full = sum(state in RUNNING for state in states) == self.limits.parallel
        assert is_full or PullState.QUEUED not in states, "one waits although there is room"
        waiting = [request_id for pull in self._pulls.values() for request_id in pull.request_ids]
        assert len(waiting) == len(set(waiting)), "a request waits for one pull"
        for pull_id, pull in self._pulls.items():
            assert pull_id == pull.pull_id, "each by its own id"
            assert pull.state is not PullState.ENDED, "what has ended is forgotten"
            is_failed = pull.state is PullState.STOPPING
            assert is_failed == (not pull.request_ids) == (pull.outcome is not None), "somebody waits until it fails"

    def _on_ordered(self, event: PullOrdered, now_ms: float) -> _Instructions:
        if self.waits(event.request_id):
            return
        for other in self._pulls.values():
            is_same = (other.source_id, other.key, other.blocks) == (event.source_id, event.key, event.blocks)
            if is_same and other.state is not PullState.STOPPING:
                other.request_ids.append(event.request_id)
                return
        self._ordered += 1
        pull_id = f"{self._name}/pull-{self._ordered}"
        waiting = sum(pull.state is PullState.QUEUED for pull in self._pulls.values())
        if reason := self._obstacle_reason or (waiting >= self.limits.queued and f"{waiting} pulls wait already"):
            yield Submit(event.request_id)
            yield PullEnded(pull_id, event.source_id, PullOutcome.REFUSED, str(reason), 0, 0.0, 0.0)
            return
        ends_ms = now_ms + self.limits.allowed_ms(event.compute_ms, event.comes_ms)
        self._pulls[pull_id] = _Pull(
            pull_id, event.source_id, event.key, event.blocks, event.compute_ms, now_ms, ends_ms, [event.request_id]
        )

    def _on_followed(self, event: PullFollowed, now_ms: float) -> _Instructions:
        pull = self._pulls.get(event.pull_id)
        if self.waits(event.request_id):
            return
        if pull is None or pull.state is PullState.STOPPING:
            yield Submit(event.request_id)
            return
        pull.request_ids.append(event.request_id)

    def _on_held(self, event: Held, now_ms: float) -> _Instructions:
        pull = self._pulls.get(event.pull_id)
        if pull is None or pull.state is not PullState.ASKING:
            return
        blocks = min(event.blocks, pull.blocks)
        if blocks <= 0:
            yield from self._fail(pull, PullOutcome.REFUSED, "the source has none of the blocks any more", now_ms)
            return
        pull.become(PullState.FETCHING)
        pull.fetch_began_ms = now_ms
        yield Fetch(pull.pull_id, blocks, max(1.0, pull.deadline_ms - now_ms))

    def _on_not_held(self, event: NotHeld, now_ms: float) -> _Instructions:
        pull = self._pulls.get(event.pull_id)
        if pull is not None and pull.state in (PullState.ASKING, PullState.FETCHING):
            outcome = PullOutcome.REFUSED if event.is_refusal else PullOutcome.FAILED
            yield from self._fail(pull, outcome, event.reason, now_ms)

    def _on_fetched(self, event: Fetched, now_ms: float) -> _Instructions:
        pull = self._pulls.get(event.pull_id)
        if pull is None or pull.state not in (PullState.FETCHING, PullState.STOPPING):
            return
        if pull.state is PullState.FETCHING:
            pull.outcome = PullOutcome.PULLED
        yield from self._end(pull, now_ms, event.blocks)

    def _on_not_fetched(self, event: NotFetched, now_ms: float) -> _Instructions:
        pull = self._pulls.get(event.pull_id)
        if pull is None or pull.state not in (PullState.FETCHING, PullState.STOPPING):
            return
        if pull.state is PullState.FETCHING:
            pull.outcome, pull.reason = PullOutcome.FAILED, event.reason
        yield from self._end(pull, now_ms)

    def _on_gone(self, event: RequestGone, now_ms: float) -> _Instructions:
        pull = self._pull_of(event.request_id)
        if pull is None:
            return
        pull.request_ids.remove(event.request_id)
        if not pull.request_ids:
            yield from self._fail(pull, PullOutcome.CANCELLED, "nobody wants it any more", now_ms)

    def _on_obstacle(self, event: ObstacleChanged, now_ms: float) -> _Instructions:
        self._obstacle_reason = event.reason
        return iter(())

    def _on_tick(self, event: Tick, now_ms: float) -> _Instructions:
        for pull in tuple(self._pulls.values()):
            if pull.state is not PullState.STOPPING and now_ms >= pull.deadline_ms:
                allowed_ms = pull.deadline_ms - pull.ordered_ms
                reason = f"{pull.state} after {allowed_ms:.0f} ms, in which it could have been computed"
                yield from self._fail(pull, PullOutcome.LATE, reason, now_ms)

    def _on_stopped(self, event: Stopped, now_ms: float) -> _Instructions:
        self._obstacle_reason = "the worker ends"
        for pull in tuple(self._pulls.values()):
            if pull.state is not PullState.STOPPING:
                pull.request_ids.clear()
                yield from self._fail(pull, PullOutcome.CANCELLED, self._obstacle_reason, now_ms)

    def _fail(self, pull: _Pull, outcome: PullOutcome, reason: str, now_ms: float) -> _Instructions:
        """Its requests are computed, at once; what is being copied is stopped first, which takes a moment."""
        pull.outcome, pull.reason = outcome, reason
        yield from self._submit(pull)
        if pull.state is PullState.FETCHING:
            pull.become(PullState.STOPPING)
            yield CancelFetch(pull.pull_id)
        else:
            yield from self._end(pull, now_ms)

    def _end(self, pull: _Pull, now_ms: float, blocks: int = 0) -> _Instructions:
        assert pull.outcome is not None, "it was decided before"
        yield from self._submit(pull)
        is_asked, fetch_ms = pull.state is not PullState.QUEUED, 0.0
        if pull.state in (PullState.FETCHING, PullState.STOPPING):
            fetch_ms = now_ms - pull.fetch_began_ms
        pull.become(PullState.ENDED)
        del self._pulls[pull.pull_id]
        if is_asked:
            yield EndHold(pull.pull_id)
        yield PullEnded(
            pull.pull_id, pull.source_id, pull.outcome, pull.reason, blocks, now_ms - pull.ordered_ms, fetch_ms
        )

    def _submit(self, pull: _Pull) -> _Instructions:
        for request_id in pull.request_ids:
            yield Submit(request_id)
        pull.request_ids.clear()

    def _next(self, now_ms: float) -> _Instructions:
        running = sum(pull.state in RUNNING for pull in self._pulls.values())
        for pull in tuple(self._pulls.values()):
            if running >= self.limits.parallel:
                return
            if pull.state is not PullState.QUEUED:
                continue
            running += 1
            pull.become(PullState.ASKING)
            left_ms = max(1.0, pull.deadline_ms - now_ms)
            wait_ms = self.limits.wait_ms(left_ms, pull.compute_ms)
            yield AskHold(pull.pull_id, pull.source_id, pull.request_ids[0], pull.blocks, wait_ms, left_ms)

    def _pull_of(self, request_id: str) -> _Pull | None:
        return next((pull for pull in self._pulls.values() if request_id in pull.request_ids), None)


_HANDLERS: dict[type, Callable[..., _Instructions]] = {
    PullOrdered: PullManager._on_ordered,
    PullFollowed: PullManager._on_followed,
    Held: PullManager._on_held,
    NotHeld: PullManager._on_not_held,
    Fetched: PullManager._on_fetched,
    NotFetched: PullManager._on_not_fetched,
    RequestGone: PullManager._on_gone,
    ObstacleChanged: PullManager._on_obstacle,
    Tick: PullManager._on_tick,
    Stopped: PullManager._on_stopped,
}
