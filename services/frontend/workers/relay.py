"""Passes tokens from whichever worker owns a request to its client, none lost and none doubled.

`Relay` is one engine request, with all that is needed to place it again; `RelayRegistry` has those of this frontend,
and carries out what `RelayManager` decides. Where a lost request goes on is decided by `placement.placer`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

from controlplane.model.adapter import Adapter
from controlplane.model.incarnation import Incarnation
from controlplane.model.queue_belief import PresentLoad
from controlplane.model.request import Tenant
from controlplane.protocols.ownership import Filled
from controlplane.protocols.relay.events import (
    Abort,
    Adopted,
    DeltaCame,
    Dropped,
    Event,
    Fail,
    FailAdopted,
    FailBroken,
    FinishAtLength,
    Forget,
    Instruction,
    Loss,
    LossReason,
    Moved,
    Pass,
    Recover,
    RelayedRequest,
    RelayState,
    Release,
    Released,
    ReportLoss,
    Submitted,
    Tick,
    Why,
    Withdrawn,
    WorkerGaveUp,
    WorkerLost,
)
from controlplane.protocols.relay.manager import RelayManager
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

_Delta: TypeAlias = request_pb2.TokenDelta

_RECOVERABLE: Final[dict[int, LossReason]] = {
    request_pb2.ERROR_CODE_UNSPECIFIED: LossReason.UNAVAILABLE,
    request_pb2.ERROR_CODE_UNAVAILABLE: LossReason.UNAVAILABLE,
    request_pb2.ERROR_CODE_LOST: LossReason.HANDOFF,
    request_pb2.ERROR_CODE_BOUNCED: LossReason.BOUNCED,
}

_GIVEN_UP: Final = frozenset((request_pb2.FINISH_REASON_ERROR, request_pb2.FINISH_REASON_ABORT))


class Relay:
    """One choice: what another worker needs to go on with it at any moment, and its client's mailbox."""

    __slots__ = (
        "adapter",
        "cache_salt",
        "deadline_s",
        "index",
        "mailbox",
        "media",
        "model",
        "on_lost",
        "priority",
        "prompt_token_ids",
        "request",
        "request_id",
        "resume",
        "sampling",
        "started_s",
        "tenant",
        "traceparent",
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
        on_lost: Callable[["Relay", Loss[ApiError]], None],
        resume: request_pb2.Resume | None = None,
        cache_salt: str = "",
        traceparent: str = "",
        media: request_pb2.PromptMedia | None = None,
        emitted_token_ids: list[int] | None = None,
        adapter: request_pb2.Adapter | None = None,
        tenant: request_pb2.Tenant | None = None,
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
        self.deadline_s = deadline_s
        self.resume = resume
        """What lets another frontend go on with it; None: it ends with this one."""
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.tenant = tenant
        self.traceparent = traceparent
        self.media = media
        """Images and the like of the prompt, kept as long as it may have to be placed again."""
        self.mailbox = mailbox
        self.on_lost = on_lost
        self.request = RelayedRequest[_Delta](request_id, sampling.max_tokens, emitted_token_ids)

    @property
    def adapter_digest(self) -> str:
        """Of the LoRA adapter that answers it; empty without one."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def finished(self) -> bool:
        """No more tokens will come, or none are wanted."""
        return self.request.state is RelayState.ENDED

    @property
    def instance_id(self) -> str:
        """The owner, or the latest one while there is none."""
        return self.request.instance_id

    @property
    def emitted_token_ids(self) -> list[int]:
        """All tokens that its client got or is about to get, those of former owners included."""
        return self.request.stream.token_ids

    def generate_request(self, now_s: float) -> request_pb2.GenerateRequest:
        """The request as a worker takes it, as of now."""
        left_s = self.started_s + self.deadline_s - now_s
        return request_pb2.GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            emitted_token_ids=self.emitted_token_ids,
            sampling=self.sampling,
            priority=self.priority,
            deadline_ms=max(1, int(1000 * left_s)),
            model=self.model,
            epoch=self.request.stream.epoch,
            resume=self.resume,
            cache_salt=self.cache_salt,
            traceparent=self.traceparent,
            media=self.media,
            adapter=self.adapter,
            tenant=self.tenant,
        )

    def put(self, delta: _Delta) -> None:
        """Give a delta to its client."""
        cached = delta.cached_tokens if delta.HasField("cached_tokens") else None
        piece = Piece(
            self.index, list(delta.token_ids), delta.logprobs, delta.finish_reason, cached, delta.prompt_logprobs
        )
        self.mailbox.put(piece)

    def put_without_logprobs(self, token_ids: Sequence[int], finish_reason: int) -> None:
        """Give tokens to its client of which nothing more is known."""
        self.mailbox.put(Piece(self.index, list(token_ids), (), finish_reason, None))


class Link(Protocol):
    """The stream to one worker, as far as relays need it."""

    @property
    def connected(self) -> asyncio.Event:
        """Set while the worker takes requests from us."""

    def abort(self, request_id: str, epoch: int, *, is_done: bool = False) -> None:
        """Tell it to drop a request in the life of this epoch; `is_done`: its client has all that it wanted."""

    def release(self, request_id: str, epoch: int) -> None:
        """Tell it that the client of a request, in the life of this epoch, may come back to another frontend."""


class RelayRegistry:
    """All engine requests of this frontend, by request id: a request's tokens may come over any link."""

    def __init__(self, metrics: FrontendMetrics, links: Mapping[Incarnation, Link], clock: Callable[[], float]) -> None:
        """`links`: those to all workers, as they come and go."""
        self._metrics = metrics
        self._links = links
        self._clock = clock
        self._manager = RelayManager[_Delta, ApiError]()
        self._relays: dict[str, Relay] = {}
        """Those that the manager has."""

    def __len__(self) -> int:
        return len(self._relays)

    def owned(self) -> Counter[Incarnation]:
        """How many requests each worker has."""
        return self._manager.owned()

    def submitted(self, relay: Relay, owner: Incarnation) -> None:
        """A worker was given the request: from now on deltas of its id go to it."""
        self._handle(Submitted(relay.request, owner))
        self._relays[relay.request_id] = relay

    def adopted(self, relay: Relay, owner: Incarnation, epoch: int) -> None:
        """A request of another frontend, which a worker has, is ours from now on."""
        self._handle(Adopted(relay.request, owner, epoch))
        self._relays[relay.request_id] = relay

    def withdraw(self, relay: Relay) -> None:
        """The request is to be submitted anew: its worker drops it."""
        self._handle(Withdrawn(relay.request_id))
        del self._relays[relay.request_id]

    def drop(self, relay: Relay, *, is_done: bool = False) -> None:
        """Nobody wants its tokens any more (`is_done`: its client has all of them): its worker drops it, and those that
        are on their way are dropped here."""
        if not relay.finished:
            self._handle(Dropped(relay.request_id, is_done))

    def release(self, relay: Relay) -> None:
        """Its client has gone, and may come back to any frontend: its worker keeps it for a while."""
        if not relay.finished:
            self._handle(Released(relay.request_id))

    def fail(self, relay: Relay, error: ApiError) -> None:
        """Drop it, and tell its client why; what has come for it before is still delivered."""
        if not relay.finished:
            relay.mailbox.fail(error)
            self.drop(relay)

    def deliver(self, sender: Incarnation, delta: _Delta, now_s: float) -> None:
        """Pass a delta on to its request; have the worker drop the request where nobody here wants it any more.

        Nearly every delta just goes on where the last one ended. Those do not become events: a token costs 3.2 us of
        CPU here, and 6.2 us when it comes and goes as an event and an instruction.
        """
        relay = self._relays.get(delta.request_id)
        if relay is not None and relay.request.stream.push(sender, delta):
            relay.put(delta)
        elif relay is not None and delta.finish_reason in _GIVEN_UP:
            error, reason = _error_of(delta.error, relay.deadline_s), _RECOVERABLE.get(delta.error.code)
            present = _present_of(delta.error)
            self._handle(WorkerGaveUp(delta.request_id, sender, delta.epoch, error, reason, present))
        else:
            self._carry_out(self._manager.handle(DeltaCame(sender, delta), now_s))

    def moved(self, sender: Incarnation, moved: worker_pb2.RequestMoved) -> None:
        """A worker says that it has handed a request off, and to whom."""
        target = Incarnation(moved.instance_id, moved.incarnation_id)
        link, lost = self._links.get(target), None
        if link is None or not link.connected.is_set():
            message = f"The worker {target.instance_id} that this request moved to was lost."
            lost = Loss(LossReason.HANDOFF, target.instance_id, upstream_failed(message, "worker_lost"))
        self._handle(Moved(moved.request_id, sender, target, moved.epoch, lost))

    def worker_lost(self, sender: Incarnation, reason: LossReason, message: str, *, is_connected: bool = False) -> None:
        """All requests of a worker need another owner; `is_connected`: it hangs, and is to drop what it has."""
        error = upstream_failed(
            f"The worker {sender.instance_id} that served this request was lost: {message}", reason.value
        )
        self._handle(WorkerLost(sender, Loss(reason, sender.instance_id, error), is_connected))

    def tick(self) -> None:
        """Have relays that hold tokens wait no longer than they may; call it some ten times a second."""
        self._handle(Tick())

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        self._manager.validate()
        assert len(self._relays) == len(self._manager), "the manager has the same requests"
        for request_id, relay in self._relays.items():
            assert relay.request_id == request_id, "kept by its own id"
            assert not relay.finished, f"nobody waits for it any more: {relay.request.story}"

    def _handle(self, event: Event[_Delta, ApiError]) -> None:
        self._carry_out(self._manager.handle(event, self._clock()))

    def _carry_out(self, instructions: Sequence[Instruction[_Delta, ApiError]]) -> None:
        for instruction in instructions:
            match instruction:
                case Pass(request_id, passed):
                    self._pass(self._relays[request_id], passed)
                case Abort(worker, request_id, epoch, why):
                    self._abort(worker, request_id, epoch, why)
                case Release(worker, request_id, epoch):
                    if (link := self._links.get(worker)) is not None:
                        link.release(request_id, epoch)
                case Recover(request_id, loss):
                    relay = self._relays[request_id]
                    relay.on_lost(relay, loss)
                case FinishAtLength(request_id):
                    self._relays[request_id].put_without_logprobs((), request_pb2.FINISH_REASON_LENGTH)
                case Fail(request_id, error):
                    self._relays[request_id].mailbox.fail(error)
                case FailBroken(request_id, gap):
                    log.error("token stream broken", extra={"request_id": request_id, "error": str(gap)})
                    self._metrics.token_gaps.inc()
                    message = f"The worker's token stream is broken: {gap}"
                    self._relays[request_id].mailbox.fail(upstream_failed(message, "token_gap"))
                case FailAdopted(request_id):
                    self._relays[request_id].mailbox.fail(adopted_elsewhere())
                case ReportLoss(instance_id, reason, requests):
                    self._report_loss(instance_id, reason, requests)
                case Forget(request_id):
                    del self._relays[request_id]

    def _pass(self, relay: Relay, passed: Sequence[_Delta | Filled]) -> None:
        for one in passed:
            if isinstance(one, Filled):
                relay.put_without_logprobs(one.token_ids, 0)
            else:
                relay.put(one)

    def _abort(self, worker: Incarnation, request_id: str, epoch: int, why: Why) -> None:
        if why is Why.STRAY:
            log.warning(
                "a worker goes on with a request that is not its own any more",
                extra={"request_id": request_id, "instance_id": worker.instance_id},
            )
        if (link := self._links.get(worker)) is not None:
            link.abort(request_id, epoch, is_done=why is Why.DONE)

    def _report_loss(self, instance_id: str, reason: LossReason, requests: int) -> None:
        self._metrics.worker_losses.labels(reason.value).inc(requests)
        if requests:
            log.error("requests lost with their worker", extra={"instance_id": instance_id, "lost": requests})
            if reason is LossReason.WORKER_LOST:
                self._metrics.dead_workers.inc()


def tenant_message(tenant: Tenant) -> request_pb2.Tenant | None:
    """As a request bears it."""
    return request_pb2.Tenant(name=tenant.name, share=tenant.share) if tenant.name else None


def adapter_message(adapter: Adapter | None) -> request_pb2.Adapter | None:
    """As a request bears it."""
    if adapter is None:
        return None
    return request_pb2.Adapter(
        name=adapter.name,
        digest=adapter.digest,
        path=adapter.path,
        is_3d_lora_weight=adapter.is_3d_lora_weight,
    )


def _present_of(error: request_pb2.RequestError) -> PresentLoad | None:
    present = error.present
    return PresentLoad(present.queued_prefill_tokens, present.requests) if error.HasField("present") else None


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
