"""Puts the choices of one client request on workers, and each of them on another one when it loses its own."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from msgspec import structs

from controlplane.media_message import media_spans
from controlplane.model.prefix_hash import block_hashes, root_hash
from controlplane.model.queue_belief import PresentLoad
from controlplane.protocols.recovery import (
    Begin,
    Bounced,
    Choose,
    Chosen,
    Ended,
    Event,
    GivenUp,
    GiveUp,
    Instruction,
    Lost,
    NoneChosen,
    Nothing,
    NotSubmitted,
    Pause,
    RecoveryLimits,
    RecoveryManager,
    Run,
    Submit,
    Submitted,
    Wait,
    Woken,
)
from controlplane.protocols.relay.events import Loss, LossReason
from mesh.errors import NoInstance, PeerUnavailable, UnknownModel
from mesh.tracing import NO_TRACES, Tracer
from penstock.v1 import scheduler_pb2
from services.frontend.errors import ApiError, stopped, unavailable
from services.frontend.metrics import FrontendMetrics
from services.frontend.placement.client import Placement, PlacementClient
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.workers.link import WorkerLink
from services.frontend.workers.pool import WorkerPool
from services.frontend.workers.relay import Relay

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Placer:
    """Carries out what the recovery manager of each choice says; `close` it with the request."""

    pool: WorkerPool
    placement: PlacementClient
    block_tokens: int
    connect_wait_s: float
    limits: RecoveryLimits
    room: WaitingRoom
    metrics: FrontendMetrics
    clock: Callable[[], float]
    tracer: Tracer = NO_TRACES
    vllm_parts: str = ""
    """What vLLM's own parts do of the request, for `explain`."""
    left: set[asyncio.Task[None]] = field(default_factory=set)
    """Recoveries that go on after `close`; whoever stops the frontend cancels them."""
    _managers: dict[str, RecoveryManager] = field(default_factory=dict)
    """By request id, one for each choice."""
    _placed_ids: set[str] = field(default_factory=set)
    """Of requests whose end the schedulers have not been told."""
    _recoveries: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By request id."""
    _bounced_by: dict[str, tuple[str, PresentLoad]] = field(default_factory=dict)
    """Who has given a request back, with its load, until the scheduler is told of it with the next question."""
    _kept: frozenset[str] = frozenset()
    """Choices whose client has left and may come back."""

    async def put_new(
        self, relays: Sequence[Relay], wait_s: float, may_wait: Callable[[], bool] = lambda: True
    ) -> Placement:
        """Put the choices of one prompt on one instance; while there is none, wait for it, in the waiting room, for
        `wait_s` at most and for as long as it `may_wait`. Returns where and who said so. Raises ApiError."""
        self.room.came(relays[0].model)
        manager = self._manager(relays[0])
        first = manager.handle(Begin(wait_s if may_wait() else 0.0), self.clock())
        placement = await self._carry_out(manager, first, relays, may_wait)
        assert placement is not None, "a new request has a reader"
        return placement

    def adopt(self, relay: Relay) -> None:
        """Look after a choice that a worker has already: its client came back from another frontend."""
        self._manager(relay).handle(Submitted(relay.instance_id), self.clock())

    def recover(self, relay: Relay, loss: Loss[ApiError]) -> None:
        """Place a choice again that nobody owns, or fail it with the loss."""
        manager, emitted_tokens = self._manager(relay), len(relay.emitted_token_ids)
        if loss.reason is LossReason.BOUNCED:
            instruction = manager.handle(Bounced(loss.instance_id, emitted_tokens), self.clock())
            if loss.present is not None:
                self._bounced_by[relay.request_id] = loss.instance_id, loss.present
            self.metrics.bounces.inc()
        else:
            instruction = manager.handle(Lost(loss.instance_id, emitted_tokens), self.clock())
        story = {
            "request_id": relay.request_id,
            "instance_id": loss.instance_id,
            "reason": loss.reason.value,
            "emitted_tokens": emitted_tokens,
            "losses_without_progress": manager.budget.losses,
        }
        if isinstance(instruction, GiveUp):
            log.error("a request was lost too often", extra=story)
            self._give_up(relay, loss)
            return
        if loss.reason is LossReason.BOUNCED:
            log.info("more waits at an instance than was believed: placing a request again", extra=story)
        else:
            log.warning("recovering a request", extra=story)
        task = asyncio.get_running_loop().create_task(self._recover(relay, loss, instruction))
        self._recoveries[relay.request_id] = task
        task.add_done_callback(lambda done: self._recovered(done, relay, loss))

    def ended(self, request_id: str, ok: bool, reason: str) -> None:
        """Tell the scheduler, if it placed this one."""
        if request_id in self._placed_ids:
            self._placed_ids.discard(request_id)
            self.placement.ended(request_id, ok, reason)

    def is_recovering(self, relay: Relay) -> bool:
        """Whether it has lost its instance, and has no other one yet."""
        return relay.request_id in self._recoveries

    def close(self, ok: bool, reason: str, kept: Iterable[Relay] = ()) -> None:
        """All choices have ended: recover nothing any more but what is `kept`, which is left to its new instance."""
        self._kept = frozenset(relay.request_id for relay in kept) & self._recoveries.keys()
        for request_id, task in self._recoveries.items():
            if request_id in self._kept:
                self.left.add(task)
                task.add_done_callback(self.left.discard)
            else:
                task.cancel()
        for request_id, manager in self._managers.items():
            if request_id not in self._kept:
                manager.handle(Ended(), self.clock())
        for request_id in sorted(self._placed_ids - self._kept):
            self.ended(request_id, ok, reason)

    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept contradicts itself."""
        for manager in self._managers.values():
            manager.validate()

    def _manager(self, relay: Relay) -> RecoveryManager:
        manager = self._managers.get(relay.request_id)
        if manager is None:
            manager = self._managers[relay.request_id] = RecoveryManager(relay.request_id, self.limits)
        return manager

    async def _recover(self, relay: Relay, loss: Loss[ApiError], instruction: Instruction) -> None:
        self.ended(relay.request_id, ok=False, reason=loss.reason.value)
        try:
            await self._carry_out(self._manager(relay), instruction, [relay])
        except ApiError as error:
            log.error("a request cannot be recovered", extra={"request_id": relay.request_id, "error": str(error)})
            self._give_up(relay, loss)
            return
        if relay.finished:
            return
        if relay.request_id in self._kept:
            self.pool.relays.release(relay)
        if loss.reason is LossReason.BOUNCED:
            return
        self.metrics.recoveries.labels(loss.reason.value).inc()
        log.info("request recovered", extra={"request_id": relay.request_id, "instance_id": relay.instance_id})

    def _recovered(self, task: asyncio.Task[None], relay: Relay, loss: Loss[ApiError]) -> None:
        if self._recoveries.get(relay.request_id) is task:
            del self._recoveries[relay.request_id]
        if relay.request_id in self._kept:
            self.ended(relay.request_id, ok=False, reason="aborted")
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a recovery broke", exc_info=error, extra={"request_id": relay.request_id})
            self._give_up(relay, loss)

    def _give_up(self, relay: Relay, loss: Loss[ApiError]) -> None:
        self.metrics.failed_recoveries.labels(loss.reason.value).inc()
        self.pool.relays.fail(relay, loss.error)

    async def _carry_out(
        self,
        manager: RecoveryManager,
        instruction: Instruction,
        relays: Sequence[Relay],
        may_wait: Callable[[], bool] | None = None,
    ) -> Placement | None:
        """Until the relays are on an instance, or nobody wants them any more, which gives None. Raises ApiError where
        they are given up. `may_wait`: they are new, and wait in the waiting room as long as they may."""
        placement: Placement | None = None
        seen, waits = self.pool.news, False
        with ExitStack() as waiting:
            while not isinstance(instruction, Run):
                event: Event
                match instruction:
                    case Choose(excluded, may_overrule):
                        try:
                            placement = await self._choose(relays[0], excluded, may_overrule=may_overrule)
                            event = Chosen(placement.instance_id)
                        except (NoInstance, UnknownModel) as error:
                            event = NoneChosen(str(error))
                    case Submit(_, excluded, may_bounce):
                        assert placement is not None, "an instance was chosen"
                        event = await self._submit(relays, placement, excluded, may_bounce=may_bounce)
                    case Pause(seconds):
                        await asyncio.sleep(seconds)
                        event = Woken()
                    case Wait(seconds, because, reason):
                        if may_wait is not None and not may_wait():
                            raise _refusal(because, reason)
                        if may_wait is not None and not waits:
                            waiting.enter_context(self.room.entered(relays[0].model, _refusal(because, reason)))
                            waits = True
                        event = await self._wait(seen, seconds)
                        seen = self.pool.news
                    case GiveUp(because, reason):
                        raise _refusal(because, reason)
                    case Nothing():
                        return None
                if all(relay.finished for relay in relays):
                    event = Ended()
                instruction = manager.handle(event, self.clock())
        return placement

    async def _choose(self, relay: Relay, excluded: Iterable[str], *, may_overrule: bool) -> Placement:
        """Raises NoInstance or UnknownModel, which is no other matter here: this frontend knows the model, and that no
        instance announces it now may be over in a second."""
        token_ids = [*relay.prompt_token_ids, *relay.emitted_token_ids]
        request = scheduler_pb2.PlaceRequest(
            request_id=relay.request_id,
            model=relay.model,
            prompt_tokens=len(token_ids),
            block_hashes=block_hashes(
                token_ids,
                self.block_tokens,
                root_hash(relay.cache_salt, relay.adapter_digest),
                () if relay.media is None else media_spans(relay.media.spans),
            ),
            priority=relay.priority,
            max_tokens=relay.sampling.max_tokens - len(relay.emitted_token_ids),
            excluded_instance_ids=excluded,
            is_decoding=bool(relay.emitted_token_ids),
            adapter_digest=relay.adapter_digest,
            vllm_parts=self.vllm_parts,
        )
        if (bounced_by := self._bounced_by.pop(relay.request_id, None)) is not None:
            instance_id, present = bounced_by
            request.bounced_by.instance_id = instance_id
            request.bounced_by.present.queued_prefill_tokens = present.queued_prefill_tokens
            request.bounced_by.present.requests = present.requests
        self._placed_ids.add(relay.request_id)  # before the answer, which a client may not wait for
        try:
            with self.tracer.child("place", relay.traceparent) as span:
                placement = await self.placement.place(request)
                span.set(request_id=relay.request_id, instance=placement.instance_id, policy=placement.policy)
                return placement
        except (NoInstance, UnknownModel):
            if (may_overrule or self.placement.is_overruled(relay.model)) and self.pool.connected(relay.model):
                return self.placement.overrule(request)
            raise

    async def _submit(
        self, relays: Sequence[Relay], placement: Placement, excluded: Sequence[str], *, may_bounce: bool
    ) -> Submitted | NotSubmitted:
        instance_id = placement.instance_id
        wait_s = self._connect_wait_s(relays[0].model, instance_id, excluded)
        link = await self.pool.wait_connected(instance_id, wait_s)
        if link is None or not self._send(relays, link, placement, may_bounce=may_bounce):
            log.info("placed on an instance that is not connected", extra={"instance_id": instance_id})
            return NotSubmitted(instance_id)
        for relay in relays[1:]:
            self._manager(relay).handle(Submitted(instance_id), self.clock())
        return Submitted(instance_id)

    def _connect_wait_s(self, model: str, instance_id: str, excluded: Sequence[str]) -> float:
        """Nothing where another instance could have the request at once: the chosen one may be away for good."""
        chosen = self.pool.link(instance_id)
        if chosen is not None and chosen.is_connected:
            return 0.0  # there is nothing to wait for; nor should each placement look at every worker
        others = (link.instance_id for link in self.pool.connected(model))
        return self.connect_wait_s if all(other in (instance_id, *excluded) for other in others) else 0.0

    def _send(self, relays: Sequence[Relay], link: WorkerLink, placement: Placement, *, may_bounce: bool) -> bool:
        sent: list[Relay] = []
        belief = placement.belief
        if belief is not None:  # choices of one prompt stay together, for they compute it once
            belief = structs.replace(belief, may_bounce=may_bounce and len(relays) == 1)
        try:
            for relay in relays:
                if relay.finished:
                    continue  # its client has had enough of it meanwhile
                link.submit(
                    relay,
                    placement.decode_instance_id,
                    is_decode_open=placement.is_decode_open,
                    prefix=placement.prefix,
                    belief=belief,
                )
                sent.append(relay)
                if belief is not None:
                    belief = structs.replace(belief, new_prefill_tokens=0)
        except PeerUnavailable:
            for relay in sent:
                self.pool.relays.withdraw(relay)
            return False
        return True

    async def _wait(self, seen: int, seconds: float) -> Woken:
        if self.room.is_closed:
            raise stopped()
        return Woken(has_news=await self.pool.wait_for_news(seen, seconds))


def _refusal(because: GivenUp, reason: str) -> ApiError:
    if because is GivenUp.UNREACHABLE:
        return unavailable("The instances that were chosen for this request cannot be reached; try again.")
    return unavailable(f"No instance can take this request now: {reason}.", "no_instance")
