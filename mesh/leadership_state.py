"""Who leads a duty that only one process of the mesh may do: the candidate's side. Pure; time is an argument.

The lock is a key under a lease. A lock alone does not do: its holder may be paused, lose it, and go on acting. So each
holder gets a fencing epoch, written once by compare-and-swap and higher than any before, and whoever carries out orders
refuses those of a lower one (Gray and Cheriton's leases; the fencing tokens of Kleppmann, "How to do distributed
locking", 2016). The epoch stays ahead of the wall clock in ms, so that it grows even over a store that lost its data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol, TypeAlias

import msgspec

from mesh.errors import IllegalTransition, StaleLeader
from mesh.invariants import invariants


class LeaderRecord(msgspec.Struct, frozen=True):
    """What stands at a duty's key, as JSON, under its holder's lease."""

    duty: str
    member_id: str
    incarnation_id: str
    address: str = ""
    epoch: int = 0
    """0 while the holder is still getting its epoch; it does not lead before."""
    since_unix_ms: int = 0


class Phase(StrEnum):
    """Phases of a candidate on its way to leading."""

    WATCHING = "watching"
    """Somebody else holds the duty, or the next attempt is due after a pause."""
    LOCKING = "locking"
    READING = "reading"
    """It has the lock and reads the last epoch."""
    FENCING = "fencing"
    """It holds the lock and writes an epoch higher than any before."""
    ANNOUNCING = "announcing"
    """It writes the record that says who leads."""
    LEADING = "leading"
    RESIGNED = "resigned"
    """It does not want the duty any more."""


class Step(StrEnum):
    """Events that move a candidate from phase to phase; `TRANSITIONS` says which may happen when."""

    TRY = "try"
    LOCKED = "locked"
    READ = "read"
    FENCED = "fenced"
    RACED = "raced"
    """Somebody else has written an epoch meanwhile."""
    ANNOUNCED = "announced"
    LOST = "lost"
    RESIGN = "resign"


TRANSITIONS: Mapping[tuple[Phase, Step], Phase] = MappingProxyType(
    {
        (Phase.WATCHING, Step.TRY): Phase.LOCKING,
        (Phase.LOCKING, Step.LOCKED): Phase.READING,
        (Phase.READING, Step.READ): Phase.FENCING,
        (Phase.FENCING, Step.FENCED): Phase.ANNOUNCING,
        (Phase.FENCING, Step.RACED): Phase.READING,
        (Phase.ANNOUNCING, Step.ANNOUNCED): Phase.LEADING,
        **{
            (phase, Step.LOST): Phase.WATCHING
            for phase in (Phase.LOCKING, Phase.READING, Phase.FENCING, Phase.ANNOUNCING, Phase.LEADING)
        },
        **{(phase, Step.RESIGN): Phase.RESIGNED for phase in Phase},
    }
)


@dataclass(frozen=True, slots=True)
class Lock:
    """Get a lease, and create the duty's key under it if there is none."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ReadEpoch:
    """Read the last epoch and its key's revision."""

    attempt: int


@dataclass(frozen=True, slots=True)
class WriteEpoch:
    """Write this epoch if its key still has that revision."""

    attempt: int
    epoch: int
    expected_revision: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Write the epoch to the duty's key, if it is still as it was locked."""

    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Read the duty's key itself: what was heard of it may be of a former holder."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Unlock:
    """Revoke the lease, if there is one."""


@dataclass(frozen=True, slots=True)
class TryLater:
    """Call `retry` after a pause."""


Instruction: TypeAlias = Lock | ReadEpoch | WriteEpoch | Announce | Verify | Unlock | TryLater


class Candidate:
    """One process and one duty. Every call returns what is to be done, in order.

    Answers bear the number of the attempt that asked; those of a former attempt change nothing.
    """

    def __init__(self, duty: str, incarnation_id: str, member_id: str = "") -> None:
        """`member_id`: a holder of that name is a former life of this process, which it need not wait for."""
        self.phase = Phase.WATCHING
        self.epoch = 0
        """Its own epoch, from `FENCING` on."""
        self.holder: LeaderRecord | None = None
        """Who holds the duty, as last heard."""
        self._duty = duty
        self._incarnation_id = incarnation_id
        self._member_id = member_id
        self._attempt = 0
        self._held_until_s = -float("inf")
        self._highest = 0
        """Epoch that was ever heard of."""

    def leads(self, now_s: float) -> bool:
        """Whether it may act: it leads, and by its own clock the lease holds."""
        return self.phase is Phase.LEADING and now_s < self._held_until_s

    def retry(self) -> list[Instruction]:
        """Time has passed: lock the duty unless somebody is known to hold it."""
        is_free = self.holder is None or self.holder.member_id == self._member_id
        if self.phase is not Phase.WATCHING or not is_free:
            return []
        self._move(Step.TRY)
        self._attempt += 1
        self.epoch = 0
        return [Lock(self._attempt)]

    def heard(self, holder: LeaderRecord | None) -> list[Instruction]:
        """The duty's key stands like this now; None: it is gone."""
        self.holder = holder
        if holder is not None:
            self._highest = max(self._highest, holder.epoch)
        if self.phase is Phase.WATCHING:
            return self.retry()
        is_mine = holder is not None and holder.incarnation_id == self._incarnation_id
        return [Verify(self._attempt)] if self.phase is Phase.LEADING and not is_mine else []

    def verified(self, attempt: int, holder: LeaderRecord | None) -> list[Instruction]:
        """The answer to `Verify`: who holds the duty by the store. Gives up leading if somebody else does."""
        if attempt != self._attempt or self.phase is not Phase.LEADING:
            return []
        self.holder = holder
        if holder is not None and holder.incarnation_id == self._incarnation_id:
            return []
        return self._give_up()

    def locked(self, attempt: int, held_until_s: float | None) -> list[Instruction]:
        """The answer to `Lock`: until when the lease holds by this process's clock; None: somebody holds the duty."""
        if attempt != self._attempt or self.phase is not Phase.LOCKING:
            return []
        if held_until_s is None:
            self._move(Step.LOST)
            return [TryLater()]
        self._held_until_s = held_until_s
        self._move(Step.LOCKED)
        return [ReadEpoch(attempt)]

    def read(self, attempt: int, epoch: int, revision: int, unix_ms: int) -> list[Instruction]:
        """The answer to `ReadEpoch`; 0 and 0 where there is none."""
        if attempt != self._attempt or self.phase is not Phase.READING:
            return []
        self._move(Step.READ)
        self._highest = max(self._highest, epoch)
        self.epoch = max(self._highest + 1, unix_ms)
        return [WriteEpoch(attempt, self.epoch, revision)]

    def fenced(self, attempt: int, ok: bool) -> list[Instruction]:
        """The answer to `WriteEpoch`. Not `ok`: another candidate wrote an epoch first, so read it again."""
        if attempt != self._attempt or self.phase is not Phase.FENCING:
            return []
        if not ok:
            self._move(Step.RACED)
            return [ReadEpoch(attempt)]
        self._move(Step.FENCED)
        self._highest = max(self._highest, self.epoch)
        return [Announce(attempt, self.epoch)]

    def announced(self, attempt: int, ok: bool) -> list[Instruction]:
        """The answer to `Announce`: with `ok`, this candidate leads from now on."""
        if attempt != self._attempt or self.phase is not Phase.ANNOUNCING:
            return []
        if not ok:
            return self._give_up()
        self._move(Step.ANNOUNCED)
        return []

    def renewed(self, held_until_s: float) -> None:
        """The lease holds until then by this process's clock."""
        self._held_until_s = held_until_s

    def failed(self, attempt: int) -> list[Instruction]:
        """The store did not answer this attempt."""
        return self._give_up() if attempt == self._attempt else []

    def lease_lost(self, attempt: int) -> list[Instruction]:
        """The lease of this attempt is over."""
        return self._give_up() if attempt == self._attempt else []

    def refused(self, epoch: int) -> list[Instruction]:
        """Whoever carries out orders has seen this epoch: a higher one makes this leader step down and get one that
        is higher still."""
        self._highest = max(self._highest, epoch)
        return self._give_up() if self.phase is Phase.LEADING and epoch > self.epoch else []

    def resign(self) -> list[Instruction]:
        """Give up leading for good, as before the process ends."""
        self._move(Step.RESIGN)
        return [Unlock()]

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        if self.phase in (Phase.FENCING, Phase.ANNOUNCING, Phase.LEADING):
            assert self.epoch > 0, "who writes an epoch has one"
        if self.phase in (Phase.ANNOUNCING, Phase.LEADING):
            assert self.epoch <= self._highest, "its own epoch was heard of"
        if self.phase not in (Phase.WATCHING, Phase.LOCKING, Phase.RESIGNED):
            assert self._held_until_s > -float("inf"), "who goes on has the lock under a lease"
        assert self._attempt > 0 or self.phase in (Phase.WATCHING, Phase.RESIGNED), "each attempt has a number"

    def _give_up(self) -> list[Instruction]:
        if self.phase in (Phase.WATCHING, Phase.RESIGNED):
            return []
        self._move(Step.LOST)
        if self.holder is not None and self.holder.incarnation_id == self._incarnation_id:
            self.holder = None
        return [Unlock(), TryLater()]

    def _move(self, step: Step) -> None:
        if (self.phase, step) not in TRANSITIONS:
            raise IllegalTransition(
                f"candidate {self._incarnation_id} for {self._duty}, attempt {self._attempt}, is {self.phase}; there "
                f"is no {step} from there"
            )
        self.phase = TRANSITIONS[self.phase, step]


class Lead(Protocol):
    """The leadership under which a process gives orders: the duty's epoch, and whether it still holds."""

    @property
    def is_leading(self) -> bool:
        """Whether it may give orders now."""

    @property
    def epoch(self) -> int:
        """The leader's epoch, which every order must bear."""

    def refused(self, epoch: int) -> None:
        """An order was refused by somebody who has seen this epoch."""


class Fence:
    """Refuses orders of replaced leaders: remembers the highest epoch seen of each duty (a fencing token)."""

    def __init__(self, on_refused: Callable[[str], None] = lambda _: None) -> None:
        """`on_refused` is called with the duty of every order that is refused."""
        self._on_refused = on_refused
        self._seen: dict[str, tuple[int, str]] = {}
        """By duty, of which there are a handful."""

    def highest(self, duty: str) -> int:
        """The highest epoch seen of this duty; 0 before the first order."""
        return self._seen.get(duty, (0, ""))[0]

    def check(self, duty: str, epoch: int, leader: str) -> None:
        """Take note of an order. Raises `StaleLeader` for one of a leader that has been replaced."""
        highest, known = self._seen.get(duty, (0, ""))
        if epoch < highest or (epoch == highest and leader != known):
            self._on_refused(duty)
            raise StaleLeader(
                f"an order of {leader} as leader of {duty} in epoch {epoch} is refused: {known} leads since epoch "
                f"{highest}; only the present leader may give orders"
            )
        self._seen[duty] = (epoch, leader)
