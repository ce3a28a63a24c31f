"""Passes tokens from whichever worker owns a request to its client, none lost and none doubled.

`Relay` is one engine request, with all that is needed to place it again; `RelayRegistry` has those of this frontend.
Which deltas count is decided by `controlplane.protocols.ownership`, where a lost request goes on by `placement.placer`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import Filled, TokenGap, TokenStream
from mesh.invariants import invariants
from penstock.v1 import request_pb2, worker_pb2
from services.frontend.errors import (
    ApiError,
    adopted_elsewhere,
    bad_request,
    deadline_exceeded,
    unavailable,
    upstream_failed,
)
from services.frontend.metrics import FrontendMetrics
from services.frontend.workers.token_mailbox import Piece, TokenMailbox

log = logging.getLogger(__name__)

LossReason = Literal["worker_lost", "worker_hung", "unavailable", "handoff"]

_RECOVERABLE: Final[dict[int, LossReason]] = {
    request_pb2.ERROR_CODE_UNSPECIFIED: "unavailable",
    request_pb2.ERROR_CODE_UNAVAILABLE: "unavailable",
    request_pb2.ERROR_CODE_LOST: "handoff",
}

_GIVEN_UP: Final = frozenset((request_pb2.FINISH_REASON_ERROR, request_pb2.FINISH_REASON_ABORT))


MAX_RELEASED: Final = 4096
"""Requests whose clients may come back, as far as they are remembered: more than a worker keeps."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a request has no owner any more."""

    reason: LossReason
    instance_id: str
    error: ApiError
    """What the client is told if the request cannot be recovered."""


class Relay:
    """Passes the tokens of one choice from whoever owns it to its client's mailbox.

    Prompt, emitted tokens and sampling parameters are kept, so `generate_request` is, at any moment, what lets
    another worker go on from here.
    """

    __slots__ = (
        "_deadline_s",
        "_lost_by",
        "_mailbox",
        "_on_lost",
        "finished",
        "index",
        "model",
        "ownership",
        "priority",
        "prompt_token_ids",
        "request_id",
        "resume",
        "sampling",
        "started_s",
    )

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        model: str,
        prompt_token_ids: list[int],
        sampling: request_pb2.SamplingParams,
        priority: int,
        started_s: float,
        deadline_s: float,
        mailbox: TokenMailbox,
        on_lost: Callable[["Relay", Loss], None],
        resume: request_pb2.Resume | None = None,
        emitted_token_ids: list[int] | None = None,
    ) -> None:
        """`started_s` is when the client's request arrived, on the clock that `generate_request` is given; `on_lost`
        is to place the relay again or to fail it."""
        self.request_id = request_id
        self.index = index
        self.model = model
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.priority = priority
        self.started_s = started_s
        self.resume = resume
        """What lets another frontend go on with it; None: it ends with this one."""
        self.ownership = TokenStream[request_pb2.TokenDelta]()
        self.ownership.token_ids = emitted_token_ids or []
        self.finished = False
        """No more tokens will come, or none are wanted."""
        self._lost_by = ""
        self._deadline_s = deadline_s
        self._mailbox = mailbox
        self._on_lost = on_lost

    @property
    def instance_id(self) -> str:
        """The owner, or the latest one while there is none."""
        owner = self.ownership.owner
        return owner.instance_id if owner is not None else self._lost_by

    @property
    def emitted_token_ids(self) -> list[int]:
        """All tokens that its client got or is about to get, those of former owners included."""
        return self.ownership.token_ids

    def generate_request(self, now_s: float) -> request_pb2.GenerateRequest:
        """The request as a worker takes it, as of now."""
        left_s = self.started_s + self._deadline_s - now_s
        return request_pb2.GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            emitted_token_ids=self.emitted_token_ids,
            sampling=self.sampling,
            priority=self.priority,
            deadline_ms=max(1, int(1000 * left_s)),
            model=self.model,
            epoch=self.ownership.epoch,
            resume=self.resume,
        )

    def placed(self, owner: Incarnation) -> None:
        """A worker was given the request."""
        self.ownership.place(owner)

    def accept(self, sender: Incarnation, delta: request_pb2.TokenDelta, now_s: float) -> bool:
        """Take what an engine step brought. False: the sender is to drop the request. Raises TokenGap if the owner's
        tokens do not follow what came before."""
        if self.finished:
            return True
        if delta.finish_reason in _GIVEN_UP:
            self._given_up(sender, delta)
            return True
        passed = self.ownership.receive(sender, delta, now_s)
        if passed is None:
            return False
        self._pass_on(passed)
        return True

    def moved(self, sender: Incarnation, target: Incarnation, epoch: int) -> None:
        """The sender says who owns the request now."""
        if not self.finished:
            self._pass_on(self.ownership.moved(sender, target, epoch))

    def lost(self, sender: Incarnation, loss: Loss) -> None:
        """Nothing more will come from this sender."""
        if self.finished:
            return
        if sender != self.ownership.owner:
            self._pass_on(self.ownership.silenced(sender))
            return
        self._pass_on(self.ownership.settle())
        self._lose(loss)

    def expire(self, now_s: float) -> None:
        """Wait no longer for tokens of a former owner whose time is up; call it now and then while any are held."""
        if not self.finished:
            self._pass_on(self.ownership.expire(now_s))

    def fail(self, error: ApiError) -> None:
        """No more tokens will come, for this reason."""
        if not self.finished:
            self._mailbox.fail(error)
            self.finished = True

    def _given_up(self, sender: Incarnation, delta: request_pb2.TokenDelta) -> None:
        if not self.ownership.gives_up(sender, delta.epoch):
            self._pass_on(self.ownership.silenced(sender))
            return
        self._pass_on(self.ownership.settle())
        error = _error_of(delta.error, self._deadline_s)
        reason = _RECOVERABLE.get(delta.error.code)
        if reason is None:
            self.fail(error)
        else:
            self._lose(Loss(reason, sender.instance_id, error))

    def _lose(self, loss: Loss) -> None:
        if self.finished:
            return
        self._lost_by = loss.instance_id
        self.ownership.take_back()
        if len(self.emitted_token_ids) >= self.sampling.max_tokens:  # only the word that this was all is missing
            self._mailbox.put(Piece(self.index, [], (), request_pb2.FINISH_REASON_LENGTH, None))
            self.finished = True
        else:
            self._on_lost(self, loss)

    def _pass_on(self, passed: Sequence[request_pb2.TokenDelta | Filled]) -> None:
        for one in passed:
            if isinstance(one, Filled):
                self._mailbox.put(Piece(self.index, list(one.token_ids), (), 0, None))
                continue
            cached = one.cached_tokens if one.HasField("cached_tokens") else None
            self._mailbox.put(Piece(self.index, list(one.token_ids), one.logprobs, one.finish_reason, cached))
            if one.finish_reason:
                self.finished = True
                return


class Link(Protocol):
    """The stream to one worker, as far as a relay needs it."""

    @property
    def sender(self) -> Incarnation:
        """The worker at its other end."""

    def abort(self, request_id: str) -> None:
        """Tell it to drop a request."""

    def release(self, request_id: str) -> None:
        """Tell it that the client of a request may come back to another frontend."""


class RelayRegistry:
    """All engine requests of this frontend, by request id: a request's tokens may come over any link."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._relays: dict[str, Relay] = {}
        self._holding: dict[str, Relay] = {}
        """Those that wait for tokens of a former owner."""
        self._released: dict[str, None] = {}
        """Ids of those that were left to their worker, the oldest first. They may move on from there."""

    def __len__(self) -> int:
        return len(self._relays)

    def add(self, relay: Relay) -> None:
        """From now on deltas of its id go to it."""
        self._relays[relay.request_id] = relay
        self._released.pop(relay.request_id, None)

    def remove(self, relay: Relay) -> None:
        """What still comes for it is dropped."""
        if self._relays.get(relay.request_id) is relay:  # another one may have come by a resumed stream
            del self._relays[relay.request_id]
            self._holding.pop(relay.request_id, None)

    def release(self, relay: Relay) -> None:
        """As `remove`; but whichever worker has it is to keep it for its client."""
        self.remove(relay)
        self._released[relay.request_id] = None
        if len(self._released) > MAX_RELEASED:
            del self._released[next(iter(self._released))]

    def drop(self, link: Link, request_id: str) -> None:
        """A worker has got a request from another one, and nobody here waits for it."""
        if request_id in self._released:
            link.release(request_id)
        else:
            link.abort(request_id)

    def owned(self) -> Counter[Incarnation]:
        """How many requests each worker has."""
        owners = (relay.ownership.owner for relay in self._relays.values())
        return Counter(owner for owner in owners if owner is not None)

    def of(self, sender: Incarnation) -> list[Relay]:
        """The requests that a worker has."""
        return [relay for relay in self._relays.values() if relay.ownership.owner == sender]

    def deliver(self, link: Link, delta: request_pb2.TokenDelta, now_s: float) -> None:
        """Pass a delta on to its request; have the worker drop the request where nobody here wants it any more."""
        relay = self._relays.get(delta.request_id)
        if relay is None:
            if delta.emitted_token_ids:  # it moved there while its client took it back elsewhere
                self.drop(link, delta.request_id)
            return
        try:
            if not relay.accept(link.sender, delta, now_s):
                log.warning(
                    "a worker goes on with a request that is not its own any more",
                    extra={"request_id": relay.request_id, "instance_id": link.sender.instance_id},
                )
                link.abort(relay.request_id)
        except TokenGap as error:
            log.error("token stream broken", extra={"request_id": relay.request_id, "error": str(error)})
            self._metrics.token_gaps.inc()
            link.abort(relay.request_id)
            relay.fail(upstream_failed(f"The worker's token stream is broken: {error}", "token_gap"))
        self._look_after(relay)

    def moved(self, sender: Incarnation, moved: worker_pb2.RequestMoved) -> Relay | None:
        """A worker says that a request lives elsewhere; returns it if it is still wanted."""
        relay = self._relays.get(moved.request_id)
        if relay is not None:
            relay.moved(sender, Incarnation(moved.instance_id, moved.incarnation_id), moved.epoch)
            self._look_after(relay)
        return relay

    def lose(self, sender: Incarnation, loss: Loss) -> int:
        """Nothing more comes from a worker. Returns how many requests that left without an owner."""
        lost = len(self.of(sender))
        self._metrics.worker_losses.labels(loss.reason).inc(lost)
        if lost and loss.reason == "worker_lost":
            self._metrics.dead_workers.inc()
        for relay in list(self._relays.values()):
            relay.lost(sender, loss)
            self._look_after(relay)
        return lost

    def expire(self, now_s: float) -> None:
        """Have all relays that hold tokens wait no longer than they may; call it some ten times a second."""
        for relay in list(self._holding.values()):
            relay.expire(now_s)
            self._look_after(relay)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`."""
        assert len(self._released) <= MAX_RELEASED, "what is remembered is bounded"
        assert self._holding.keys() <= self._relays.keys(), "only what is here can hold tokens"
        for request_id, relay in self._relays.items():
            assert relay.request_id == request_id, "kept by its own id"
            assert relay.ownership.holds <= (request_id in self._holding), f"{request_id} holds tokens unwatched"

    def _look_after(self, relay: Relay) -> None:
        if relay.finished:
            self.remove(relay)
        elif relay.ownership.holds:
            self._holding[relay.request_id] = relay
        elif self._holding:
            self._holding.pop(relay.request_id, None)


def _error_of(error: request_pb2.RequestError, deadline_s: float) -> ApiError:
    message = error.message or "the worker took the request back"
    match error.code:
        case request_pb2.ERROR_CODE_REFUSED:
            return bad_request(f"The model cannot serve this request: {message}", code="refused")
        case request_pb2.ERROR_CODE_ENGINE:
            return upstream_failed(f"The engine failed on this request: {message}", "engine_failed")
        case request_pb2.ERROR_CODE_ADOPTED:
            return adopted_elsewhere()
        case request_pb2.ERROR_CODE_DEADLINE:
            return deadline_exceeded(deadline_s)
        case _:
            return unavailable(f"The worker cannot serve this request now: {message}")
