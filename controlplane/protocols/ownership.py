"""Whose tokens of a request count while it moves between workers or outlives one: the frontend's side. Pure; time is
an argument. `Ownership` says who has the request, and is the simulator's too; `TokenStream` which tokens count.

- Every delta bears an epoch. Lower ones than ours are no longer wanted; a higher one makes its sender the owner.
- A new owner may be heard before the last tokens of the former one, which come over another stream. Its deltas are
  held until those arrive, until the former owner is known to send no more, or until `hold_s` has passed; then the gap
  is filled from the account of emitted tokens that the new owner's first delta bears.
- Between the loss of an owner and the next placement there is none, and nobody can make himself owner.
"""

from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from controlplane.model.incarnation import Incarnation
from mesh.errors import IllegalTransition, RpcError
from mesh.invariants import invariants

HOLD_S: Final = 1.0
MAX_HELD_DELTAS: Final = 256
EPOCHS_PER_RECOVERY: Final = 1 << 20
"""A move takes one epoch, a recovery a million: none of the moves that a frontend has not heard of has the epoch of the
recovery that followed. (With steps of one and two, two unheard moves made a second owner in the recovery's epoch.)"""
EPOCHS_PER_ADOPTION: Final = 1 << 40
"""More than all recoveries: what a former frontend still does for a request is overtaken."""


class TokenGap(RpcError):
    """A worker sent tokens that do not follow those it sent before (a bug; the message tells the story)."""


class Delta(Protocol):
    """What an engine step added to a request, as far as it matters here."""

    @property
    def epoch(self) -> int:
        """The request's epoch at its sender."""

    @property
    def offset(self) -> int:
        """Index of the first token among all generated ones."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens that the step added, in order; may be empty."""

    @property
    def emitted_token_ids(self) -> Sequence[int]:
        """All tokens before `offset`; on the first delta after a handoff only."""

    @property
    def finish_reason(self) -> int:
        """Not 0 on the request's last delta."""


class Filled(NamedTuple):
    """Tokens that are known from the new owner's account only, so without logprobs."""

    token_ids: Sequence[int]


D = TypeVar("D", bound=Delta)


class Ownership:
    """Who has one request: at most one instance, under an epoch that grows with every change."""

    __slots__ = ("epoch", "owner")

    def __init__(self) -> None:
        self.epoch = 0
        self.owner: Incarnation | None = None

    def place(self, owner: Incarnation) -> None:
        """The request is given to a worker, under the present epoch. Raises IllegalTransition if it has an owner."""
        if self.owner is not None:
            raise IllegalTransition(
                f"a request of {self.owner.instance_id} in epoch {self.epoch} is placed on {owner.instance_id} without "
                "having been taken back; this is a bug of the frontend"
            )
        self.owner = owner

    def claim(self, claimant: Incarnation, epoch: int) -> bool:
        """`claimant` goes on with the request under `epoch`: whether it owns it from now on. False where a recovery
        has overtaken that. While nobody owns the request nobody can make himself owner, but its next epoch will be
        higher than his."""
        if epoch <= self.epoch:
            return False
        if self.owner is None:
            self.epoch = epoch + EPOCHS_PER_RECOVERY
            return False
        self.owner, self.epoch = claimant, epoch
        return True

    def take_back(self) -> None:
        """Nobody owns the request from now on; a new epoch begins."""
        self.owner = None
        self.epoch += EPOCHS_PER_RECOVERY


class TokenStream(Ownership, Generic[D]):
    """The tokens of one request, from whoever owns it. What is returned is to be passed on, in order: each token
    exactly once."""

    __slots__ = ("_deadline_s", "_formers", "_handoff_offset", "_held", "_hold_s", "_told", "token_ids")

    def __init__(self, hold_s: float = HOLD_S) -> None:
        super().__init__()
        self.token_ids: list[int] = []
        """All that were passed on."""
        self._hold_s = hold_s
        self._formers: set[Incarnation] = set()
        """Former owners whose last tokens may still come."""
        self._handoff_offset = 0
        """Offset of the present owner's first token."""
        self._held: list[D] = []
        self._deadline_s: float | None = None
        self._told: set[tuple[Incarnation, int]] = set()
        """Lives, by sender and epoch, that are not wanted and know it."""

    @property
    def holds(self) -> bool:
        """Tokens wait for earlier ones: call `expire` now and then."""
        return bool(self._held)

    def place(self, owner: Incarnation) -> None:
        super().place(owner)
        self._told.clear()

    def adopt(self, owner: Incarnation, epoch: int) -> None:
        """The request comes from another frontend, with the tokens that its owner told of."""
        assert self.owner is None, "a request is adopted before anything else"
        self.owner, self.epoch = owner, epoch

    def take_back(self) -> None:
        super().take_back()
        self._forget_formers()

    def push(self, sender: Incarnation, delta: D) -> bool:
        """Take a delta that simply goes on where its owner's last one ended, as nearly all do; it is to be passed on.
        False: it is another one, and `receive` takes it."""
        if (
            delta.epoch != self.epoch
            or sender != self.owner
            or delta.offset != len(self.token_ids)
            or self._held
            or delta.finish_reason
        ):
            return False
        self.token_ids += delta.token_ids
        return True

    def receive(self, sender: Incarnation, delta: D, now_s: float) -> Sequence[D | Filled] | None:
        """Tokens have come. None: they are not wanted and the sender is to drop the request (said once). Raises
        TokenGap if the owner leaves tokens out or repeats some."""
        if delta.epoch == self.epoch and sender == self.owner:
            if self._held:
                return self._hold(delta, now_s)
            if delta.offset != len(self.token_ids):
                raise TokenGap(
                    f"instance {sender.instance_id} in epoch {self.epoch}: expected the token at offset "
                    f"{len(self.token_ids)}, got {len(delta.token_ids)} from offset {delta.offset}"
                )
            self.token_ids += delta.token_ids
            return (delta,)
        if delta.epoch > self.epoch:
            return self._handed_off(sender, delta, now_s)
        if sender in self._formers and self._held:
            return self._late(delta, now_s)
        return self._unwanted(sender, delta.epoch)

    def moved(self, sender: Incarnation, target: Incarnation, epoch: int) -> Sequence[D | Filled]:
        """`sender` says that it has handed the request off and that all its tokens have been sent."""
        if sender == self.owner and epoch > self.epoch:
            self.owner, self.epoch = target, epoch
            return ()
        return self.silenced(sender)

    def gives_up(self, sender: Incarnation, epoch: int) -> bool:
        """`sender` has ended the request with an error: whether it was the owner, who leaves the request to nobody."""
        if epoch > self.epoch and not self.claim(sender, epoch):
            return False
        return sender == self.owner and epoch == self.epoch

    def silenced(self, sender: Incarnation) -> Sequence[D | Filled]:
        """A sender that is not the owner will send no more."""
        if sender in self._formers:
            self._formers.discard(sender)
            if not self._formers:
                return self.settle()
        return ()

    def expire(self, now_s: float) -> Sequence[D | Filled]:
        """Wait no longer for former owners if the time for that is up; what is released is to be passed on."""
        if self._deadline_s is not None and now_s >= self._deadline_s:
            return self.settle()
        return ()

    def settle(self) -> Sequence[D | Filled]:
        """Wait no longer for former owners: pass on what is held, filling gaps from the accounts of new owners."""
        held = self._held
        self._forget_formers()
        passed: list[D | Filled] = []
        for delta in held:
            received = len(self.token_ids)
            if delta.offset < received:
                continue
            missing = list(delta.emitted_token_ids)[received : delta.offset]
            if len(missing) != delta.offset - received:
                break
            if missing:
                passed.append(Filled(missing))
            self.token_ids += missing
            self.token_ids += delta.token_ids
            passed.append(delta)
        return passed

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert self.epoch >= 0, "epochs count from 0"
        assert bool(self._held) == (self._deadline_s is not None), "what is held has a deadline, and nothing else has"
        assert len(self._held) <= MAX_HELD_DELTAS, "what is held is bounded"
        order = [(delta.epoch, delta.offset) for delta in self._held]
        assert order == sorted(order), "what is held is passed on in the order of epochs and offsets"
        assert all(epoch <= self.epoch for epoch, _ in order), "nothing is held of an owner to come"
        if self.owner is None:
            assert not self._formers, "a request that nobody owns has been taken back from all former owners"
            assert not self._held, "nothing is held for a request that nobody owns"

    def _handed_off(self, sender: Incarnation, delta: D, now_s: float) -> Sequence[D | Filled] | None:
        account = list(delta.emitted_token_ids)
        former = self.owner
        if former is None:
            self.claim(sender, delta.epoch)
            return self._unwanted(sender, delta.epoch)
        if len(account) != delta.offset or account[: len(self.token_ids)] != self.token_ids:
            # A life of the request that a recovery has overtaken and that went on to move: its tokens are not ours.
            return self._unwanted(sender, delta.epoch)
        self.claim(sender, delta.epoch)
        self._formers.add(former)
        self._formers.discard(sender)
        self._handoff_offset = delta.offset
        return self._hold(delta, now_s)

    def _late(self, delta: D, now_s: float) -> Sequence[D | Filled]:
        beyond = delta.offset + len(delta.token_ids) > self._handoff_offset
        if beyond or delta.offset < len(self.token_ids):
            return ()
        return self._hold(delta, now_s)

    def _hold(self, delta: D, now_s: float) -> Sequence[D | Filled]:
        self._held.append(delta)
        self._held.sort(key=lambda one: (one.epoch, one.offset))
        if self._deadline_s is None:
            self._deadline_s = now_s + self._hold_s
        if len(self._held) > MAX_HELD_DELTAS:
            return self.settle()
        passed: list[D | Filled] = []
        while self._held and self._held[0].offset == len(self.token_ids):
            delta = self._held.pop(0)
            self.token_ids += delta.token_ids
            passed.append(delta)
        if not self._held:
            self._forget_formers()
        return passed

    def _unwanted(self, sender: Incarnation, epoch: int) -> Sequence[D | Filled] | None:
        if sender == self.owner or (sender, epoch) in self._told:
            return ()
        self._told.add((sender, epoch))
        return None

    def _forget_formers(self) -> None:
        self._formers.clear()
        self._held = []
        self._deadline_s = None
