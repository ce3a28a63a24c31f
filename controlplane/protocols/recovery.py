"""Puts one request on an instance, and on another one whenever it loses that, within bounds. Pure; time is an argument.

    NEW --begin--> CHOOSING --chosen--> SUBMITTING --submitted--> RUNNING --lost--> PAUSED
                    |  ^  ^                 |            |                            |
       none chosen  |  |  '--not submitted--'            |                            |
                    |  |  '------------bounced-----------'                            |
                    v  |                                                              |
                   WAITING        (CHOOSING again as soon as the pause is over) <-----'

Every state but ENDED may become ENDED: the request has all its tokens, nobody wants it any more, or it is given up.

The frontend and the simulator drive the same machine: they have an instance chosen, submit, wait, and tell what came of
it. Two bounds give a request up: how long one placement waits for an instance, and a `RecoveryBudget`, how often a
request is placed again that gains no token.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from controlplane.protocols.bouncing import MAX_BOUNCES
from mesh.backoff import pause_after
from mesh.errors import IllegalTransition
from mesh.invariants import invariants

MAX_CHOICES: Final = 3
"""Instances that are tried in turn, since a chosen one may turn out not to be connected; then the request waits."""
FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 2.0
"""A request that waits asks again after the first of these times, then after twice as long, up to the second."""
SHORTEST_WAIT_S: Final = 1e-6
"""What is left of a wait and is shorter is over. A clock in milliseconds may not even move by it: a simulated request
that had lost all instances then waited for ever, 4e-15 s at a time."""
OVERRULE_S: Final = 1.0
"""A scheduler that finds no instance for so long, while some are connected, is not asked any more. Long enough for the
monitors to tell it of a worker that has just joined."""
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0


class RecoveryState(StrEnum):
    """Where the request stands on its way to an instance."""

    NEW = "new"
    """Nothing was asked for yet."""
    CHOOSING = "choosing"
    """A policy is asked for an instance."""
    SUBMITTING = "submitting"
    """It is being sent to an instance, whose connection may have to be waited for."""
    RUNNING = "running"
    """An instance was given it and owns it."""
    PAUSED = "paused"
    """It has lost its instance, and is placed again after a pause."""
    WAITING = "waiting"
    """No instance can take it: it waits until one joins, or asks again after a while."""
    ENDED = "ended"
    """Nothing more is done for it."""


TRANSITIONS: Final[dict[RecoveryState, frozenset[RecoveryState]]] = {
    # RUNNING at once: it was submitted together with another choice of its client's request, or adopted.
    RecoveryState.NEW: frozenset({RecoveryState.CHOOSING, RecoveryState.RUNNING, RecoveryState.ENDED}),
    RecoveryState.CHOOSING: frozenset({RecoveryState.SUBMITTING, RecoveryState.WAITING, RecoveryState.ENDED}),
    RecoveryState.SUBMITTING: frozenset(
        {RecoveryState.RUNNING, RecoveryState.CHOOSING, RecoveryState.WAITING, RecoveryState.ENDED}
    ),
    RecoveryState.RUNNING: frozenset({RecoveryState.PAUSED, RecoveryState.CHOOSING, RecoveryState.ENDED}),
    RecoveryState.PAUSED: frozenset({RecoveryState.CHOOSING, RecoveryState.ENDED}),
    RecoveryState.WAITING: frozenset({RecoveryState.CHOOSING, RecoveryState.ENDED}),
    RecoveryState.ENDED: frozenset(),
}


# -- events


class Begin(msgspec.Struct, frozen=True):
    """Place a new request. It waits for an instance for `wait_s` at most; 0: it is given up where there is none."""

    wait_s: float


class Chosen(msgspec.Struct, frozen=True):
    """The policy chose this instance."""

    instance_id: str


class NoneChosen(msgspec.Struct, frozen=True):
    """No instance can take the request now."""

    reason: str


class Submitted(msgspec.Struct, frozen=True):
    """The instance was given the request and owns it."""

    instance_id: str


class NotSubmitted(msgspec.Struct, frozen=True):
    """The chosen instance could not be reached."""

    instance_id: str


class Lost(msgspec.Struct, frozen=True):
    """The owner has died, hangs, or has given the request back, which has `emitted_tokens` in all by now."""

    instance_id: str
    emitted_tokens: int


class Bounced(msgspec.Struct, frozen=True):
    """The instance has given the request back at once, because more waits there than was believed (`bouncing`)."""

    instance_id: str
    emitted_tokens: int


class Woken(msgspec.Struct, frozen=True):
    """A `Pause` or a `Wait` is over; `has_news`: because an instance has joined or connected."""

    has_news: bool = False


class Ended(msgspec.Struct, frozen=True):
    """The request needs no instance any more. Allowed in every state."""


Event: TypeAlias = Begin | Chosen | NoneChosen | Submitted | NotSubmitted | Lost | Bounced | Woken | Ended

# -- instructions


class GivenUp(StrEnum):
    """Why a request is placed no more."""

    NO_INSTANCE = "no_instance"
    """None could take it for as long as it may wait."""
    UNREACHABLE = "unreachable"
    """Those that were chosen last could not be reached."""
    LOST_TOO_OFTEN = "lost_too_often"
    """See `RecoveryBudget`."""


class Choose(msgspec.Struct, frozen=True):
    """Have an instance chosen, other than those that are excluded; answer `Chosen` or `NoneChosen`."""

    excluded_instance_ids: tuple[str, ...] = ()
    may_overrule: bool = False
    """If the policy finds none although some are connected, take any of those in turn."""


class Submit(msgspec.Struct, frozen=True):
    """Send the request to the instance; answer `Submitted` or `NotSubmitted`."""

    instance_id: str
    excluded_instance_ids: tuple[str, ...] = ()
    """Where it must not go instead, which says how long its connection is worth waiting for."""
    may_bounce: bool = True
    """Whether the instance may give it back because more waits there than was believed."""


class Run(msgspec.Struct, frozen=True):
    """An instance owns the request. Nothing is to be done until it is `Lost` or has `Ended`."""

    instance_id: str
    is_recovered: bool
    """It had lost an instance before."""


class Pause(msgspec.Struct, frozen=True):
    """Say `Woken` after so long, whatever happens meanwhile."""

    seconds: float


class Wait(msgspec.Struct, frozen=True):
    """Say `Woken` after so long, or as soon as an instance joins or connects."""

    seconds: float
    because: GivenUp
    """Why it would be given up, had it waited long enough."""
    reason: str


class GiveUp(msgspec.Struct, frozen=True):
    """Fail the request: nothing more is done for it."""

    because: GivenUp
    reason: str = ""


class Nothing(msgspec.Struct, frozen=True):
    """There is nothing to do."""


_NOTHING: Final = Nothing()

Instruction: TypeAlias = Choose | Submit | Run | Pause | Wait | GiveUp | Nothing


@dataclass(slots=True)
class RecoveryBudget:
    """How often and how soon a request that keeps losing its owner is placed again.

    Losses count only as long as the request gains no token: workers that are restarted one after another take nothing
    from a request that goes on between them. A number of losses alone is no bound either, because a request that waits
    in the queues of three workers that die in turn has done nothing wrong. So both have to be used up. The pauses are
    what protects the mesh from a request that kills every engine it is given to: they double, so with the defaults
    it meets about ten.
    """

    max_losses: int
    """Without a token between them."""
    patience_s: float
    """Without a token, since the first of these losses."""
    losses: int = 0
    """Since the request last gained a token."""
    _tokens: int = 0
    _since_s: float = 0.0

    def lost(self, emitted_tokens: int, now_s: float) -> float | None:
        """The request has lost its owner, having `emitted_tokens` in all: how long to wait, in seconds, before it is
        placed again. None: never."""
        if self.losses == 0 or emitted_tokens > self._tokens:
            self.losses, self._since_s, self._tokens = 0, now_s, emitted_tokens
        if self.losses >= self.max_losses and now_s - self._since_s >= self.patience_s:
            return None
        self.losses += 1
        return pause_after(self.losses - 1, FIRST_PAUSE_S, LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """Bounds of every request, those of the frontend's settings by default."""

    max_losses: int = 3
    """See `RecoveryBudget`."""
    wait_s: float = 30.0
    """How long a request that has lost its instance waits for another one, each time."""


@dataclass(slots=True)
class _Patience:
    """How long one placement waits."""

    wait_s: float
    retry_s: float
    began_s: float | None = None
    """When the first attempt had failed."""

    def waited_s(self, now_s: float) -> float:
        """Seconds since the first attempt failed; 0 before one has."""
        return 0.0 if self.began_s is None else now_s - self.began_s


@dataclass(slots=True)
class RecoveryManager:
    """Of one request, from its arrival to its end. Every event is answered by the one thing to do next.

    Raises `IllegalTransition`, with the request's story, for an event that the state does not allow.
    """

    request_id: str
    limits: RecoveryLimits
    state: RecoveryState = RecoveryState.NEW
    budget: RecoveryBudget = field(init=False)
    _patience: _Patience = field(init=False)
    _excluded: tuple[str, ...] = ()
    """Instances that are not to be chosen now."""
    _choices: int = 0
    """Instances that were chosen since the request last waited or ran."""
    _instance_id: str = ""
    """The one that was chosen last."""
    _is_recovering: bool = False
    _bounces: int = 0
    """In all its life."""

    def __post_init__(self) -> None:
        self.budget = RecoveryBudget(self.limits.max_losses, self.limits.wait_s)
        self._patience = _Patience(self.limits.wait_s, FIRST_RETRY_S)

    def handle(self, event: Event, now_s: float) -> Instruction:
        """What to do now that this has happened."""
        match event:
            case Ended():
                self.state = RecoveryState.ENDED
                return _NOTHING
            case Begin(wait_s):
                self._expect(event, RecoveryState.NEW)
                self._patience = _Patience(wait_s, FIRST_RETRY_S)
                return self._choose(now_s)
            case Chosen(instance_id):
                self._expect(event, RecoveryState.CHOOSING)
                self._go(RecoveryState.SUBMITTING)
                self._choices += 1
                self._instance_id = instance_id
                return Submit(instance_id, self._excluded, self._bounces < MAX_BOUNCES)
            case NoneChosen(reason):
                self._expect(event, RecoveryState.CHOOSING)
                return self._not_placed(GivenUp.NO_INSTANCE, reason, now_s)
            case Submitted(instance_id):
                self._expect(event, RecoveryState.NEW, RecoveryState.SUBMITTING)
                return self._run(instance_id)
            case NotSubmitted(instance_id):
                self._expect(event, RecoveryState.SUBMITTING)
                self._excluded += (instance_id,)
                if self._choices < MAX_CHOICES:
                    return self._choose(now_s)
                return self._not_placed(GivenUp.UNREACHABLE, "the chosen instances cannot be reached", now_s)
            case Lost(instance_id, emitted_tokens):
                self._expect(event, RecoveryState.RUNNING)
                return self._lose(instance_id, emitted_tokens, now_s)
            case Bounced(instance_id, emitted_tokens):
                self._expect(event, RecoveryState.RUNNING)
                if self._bounces >= MAX_BOUNCES:  # nobody may do that; and nobody may make it go round for ever
                    return self._lose(instance_id, emitted_tokens, now_s)
                self._bounces += 1
                self._patience = _Patience(self.limits.wait_s, FIRST_RETRY_S)
                return self._choose(now_s)
            case Woken(has_news):
                self._expect(event, RecoveryState.PAUSED, RecoveryState.WAITING)
                if self.state is RecoveryState.WAITING:
                    patience = self._patience
                    patience.retry_s = FIRST_RETRY_S if has_news else min(LONGEST_RETRY_S, 2 * patience.retry_s)
                return self._choose(now_s)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert self._choices <= MAX_CHOICES, self._story()
        assert len(self._excluded) <= MAX_CHOICES + 1, self._story()
        assert self.budget.losses >= 0, self._story()
        assert 0 <= self._bounces <= MAX_BOUNCES, self._story()
        assert FIRST_RETRY_S <= self._patience.retry_s <= LONGEST_RETRY_S, self._story()
        if self.state is RecoveryState.WAITING:
            assert self._patience.began_s is not None, self._story()
        if self.state is RecoveryState.RUNNING:
            assert self._instance_id, self._story()
            assert not self._excluded, self._story()
            assert not self._is_recovering, self._story()

    def _choose(self, now_s: float) -> Choose:
        self._go(RecoveryState.CHOOSING)
        return Choose(self._excluded, self._patience.waited_s(now_s) >= OVERRULE_S)

    def _run(self, instance_id: str) -> Run:
        self._go(RecoveryState.RUNNING)
        was_recovering, self._is_recovering = self._is_recovering, False
        self._instance_id, self._excluded, self._choices = instance_id, (), 0
        return Run(instance_id, was_recovering)

    def _lose(self, instance_id: str, emitted_tokens: int, now_s: float) -> Instruction:
        pause_s = self.budget.lost(emitted_tokens, now_s)
        if pause_s is None:
            self._go(RecoveryState.ENDED)
            return GiveUp(GivenUp.LOST_TOO_OFTEN)
        self._go(RecoveryState.PAUSED)
        self._is_recovering = True
        self._excluded, self._choices = (instance_id,), 0
        self._patience = _Patience(self.limits.wait_s, FIRST_RETRY_S)
        return Pause(pause_s)

    def _not_placed(self, because: GivenUp, reason: str, now_s: float) -> Instruction:
        patience = self._patience
        if patience.began_s is None:
            patience.began_s = now_s
        left_s = patience.wait_s - patience.waited_s(now_s)
        if left_s < SHORTEST_WAIT_S:
            self._go(RecoveryState.ENDED)
            return GiveUp(because, reason)
        self._go(RecoveryState.WAITING)
        # From now on nobody is excluded: the next life of the same instance is as good as another one.
        self._excluded, self._choices = (), 0
        return Wait(min(left_s, patience.retry_s), because, reason)

    def _go(self, state: RecoveryState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self._story()} cannot become {state}")
        self.state = state

    def _expect(self, event: Event, *states: RecoveryState) -> None:
        if self.state not in states:
            raise IllegalTransition(f"{self._story()} does not await {event}")

    def _story(self) -> str:
        return (
            f"request {self.request_id}, {self.state}, last on {self._instance_id or 'no instance'}, not on "
            f"{self._excluded}, {self._choices} choices, {self.budget.losses} losses without a token"
        )
