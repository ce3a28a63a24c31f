"""The choices of a client's request, adopted from the frontend that had it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.adoption import (
    AdoptionManager,
    AllAnswered,
    Ask,
    Begin,
    Closed,
    Event,
    Found,
    GiveBack,
    Instruction,
    LookedAfter,
    Pause,
    Refuse,
    Resume,
    Take,
    Woken,
)
from controlplane.protocols.relay.events import Loss, RelayState
from penstock.v1 import worker_pb2
from services.frontend.errors import ApiError, stream_behind, stream_not_found
from services.frontend.requests.resume_ticket import ResumeTicket, decode_ticket
from services.frontend.requests.service import FrontendService
from services.frontend.workers.relay import Relay
from services.frontend.workers.token_mailbox import Piece, TokenMailbox

log = logging.getLogger(__name__)


SeenTokens: TypeAlias = Callable[[int, int], int]
"""How many tokens a client has seen of a choice, by its index and the number of all."""


@dataclass(frozen=True, slots=True)
class AdoptedChoice:
    """One choice, as the worker that has it told of it."""

    relay: Relay
    message: worker_pb2.AdoptedRequest


class Adoption:
    """Of one client request, as the adoption manager says; `close` it."""

    def __init__(self, service: FrontendService, request_id: str, seen_tokens: SeenTokens) -> None:
        self._service = service
        self._seen_tokens = seen_tokens
        self._manager = AdoptionManager(request_id)
        self.request_id = request_id
        self.choices: dict[int, AdoptedChoice] = {}
        self.on_overflow: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Relay, Loss[ApiError]], None] = self._keep
        self._losses: dict[int, Loss[ApiError]] = {}
        """Of choices whose worker was lost before anybody looked after them."""
        self.mailbox = TokenMailbox(0, lambda: self.on_overflow())
        self._ticket: ResumeTicket | None = None

    async def gather(self, key_name: str) -> ResumeTicket:
        """Adopt what the workers have. Raises ApiError (404) if that is not the whole request, less than its client has
        seen of it, or another key's."""
        try:
            instruction = self._handle(Begin(key_name))
            while not isinstance(instruction, Resume):
                match instruction:
                    case Ask(timeout_s):
                        await self._service.pool.adopt(self.request_id, self._found, timeout_s)
                        instruction = self._handle(AllAnswered())
                    case Pause(seconds, indexes):
                        self._give_back(indexes)
                        await asyncio.sleep(seconds)
                        instruction = self._handle(Woken())
                    case Refuse(indexes, missing, behind):
                        if indexes and missing:
                            log.error(
                                "a stream cannot be resumed: choices are missing",
                                extra={"request_id": self.request_id, "found": indexes},
                            )
                        self._give_back(indexes)
                        raise stream_behind(self.request_id) if behind else stream_not_found(self.request_id)
                    case _:
                        raise AssertionError(f"{instruction} is no answer to what was said")
        except BaseException:  # its client may have left meanwhile
            self.close()
            raise
        assert self._ticket is not None, "each choice that was found has brought it"
        return self._ticket

    def look_after(self, on_overflow: Callable[[], None], on_lost: Callable[[Relay, Loss[ApiError]], None]) -> None:
        """The caller has the choices from now on, and drops or releases them; `on_lost` hears at once of those that
        have lost their worker meanwhile."""
        self._handle(LookedAfter())
        self.on_overflow, self.on_lost = on_overflow, on_lost
        while self._losses:
            index, loss = self._losses.popitem()
            on_lost(self.choices[index].relay, loss)

    def close(self) -> None:
        """Give back to the workers what nobody looks after, to be resumed once more."""
        instruction = self._handle(Closed())
        if isinstance(instruction, GiveBack):
            self._give_back(instruction.indexes)

    def _handle(self, event: Event) -> Instruction:
        return self._manager.handle(event, self._service.clock())

    def _found(self, sender: Incarnation, message: worker_pb2.AdoptedRequest) -> None:
        request = message.request
        try:
            ticket = decode_ticket(request.resume.ticket)
        except ValueError as error:
            log.error("a request cannot be resumed", extra={"request_id": request.request_id, "error": str(error)})
            return
        index = _choice_of(request.request_id, self.request_id)
        is_behind = len(request.emitted_token_ids) < self._seen_tokens(index, ticket.choices)
        instruction = self._handle(Found(index, request.epoch, ticket.choices, ticket.key_name, is_behind))
        if isinstance(instruction, Take):
            if instruction.is_newer:
                self._service.pool.relays.drop(self.choices[index].relay)
                self.mailbox.discard(index)
                self._losses.pop(index, None)
            self._ticket = ticket
            self._take(index, sender, message)

    def _take(self, index: int, sender: Incarnation, message: worker_pb2.AdoptedRequest) -> None:
        request, relay = message.request, self._relay(index, message)
        self.choices[index] = AdoptedChoice(relay, message)
        cached = message.cached_tokens if message.HasField("cached_tokens") else None
        self.mailbox.preload(
            Piece(index, list(request.emitted_token_ids), (), message.finish_reason, cached),
            self._service.settings.max_pending_tokens,
        )
        if message.is_ended:
            relay.request.go(RelayState.ENDED)
        else:
            self._service.pool.relays.adopted(relay, sender, request.epoch)

    def _give_back(self, indexes: tuple[int, ...]) -> None:
        for index in indexes:
            self._service.pool.relays.release(self.choices.pop(index).relay)
            self.mailbox.discard(index)
            self._losses.pop(index, None)

    def _relay(self, index: int, message: worker_pb2.AdoptedRequest) -> Relay:
        request, deadline_s = message.request, self._service.settings.request_deadline_s
        left_s = request.deadline_ms / 1000 or deadline_s
        return Relay(
            request_id=request.request_id,
            index=index,
            model=request.model,
            prompt_token_ids=list(request.prompt_token_ids),
            sampling=request.sampling,
            priority=request.priority,
            started_s=self._service.clock() + left_s - deadline_s,
            deadline_s=deadline_s,
            mailbox=self.mailbox,
            on_lost=lambda relay, loss: self.on_lost(relay, loss),
            resume=request.resume,
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
            media=request.media if request.HasField("media") else None,
            emitted_token_ids=list(request.emitted_token_ids),
            adapter=request.adapter if request.HasField("adapter") else None,
            tenant=request.tenant if request.HasField("tenant") else None,
        )

    def _keep(self, relay: Relay, loss: Loss[ApiError]) -> None:
        self._losses[relay.index] = loss


def _choice_of(engine_request_id: str, client_request_id: str) -> int:
    """See `GenerationPlan.engine_request_id`."""
    suffix = engine_request_id.removeprefix(client_request_id).removeprefix("-")
    return int(suffix) if suffix.isdecimal() else 0
