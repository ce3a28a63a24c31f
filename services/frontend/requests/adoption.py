"""The choices of a client's request, taken over from the frontend that had it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.relay.events import Loss, RelayState
from penstock.v1 import worker_pb2
from services.frontend.errors import ApiError, stream_not_found
from services.frontend.requests.resume_ticket import ResumeTicket, decode_ticket
from services.frontend.requests.service import FrontendService
from services.frontend.workers.relay import Relay
from services.frontend.workers.token_mailbox import Piece, TokenMailbox

log = logging.getLogger(__name__)

ANSWER_S: Final = 1.0
"""How long workers are given to say what they have."""
RETRY_S: Final = 0.2
PATIENCE_S: Final = 3.0
"""For a request that is nowhere just now: it may be moving, or the frontend that was asked has only just started."""


@dataclass(frozen=True, slots=True)
class AdoptedChoice:
    """One choice, as the worker that has it told of it."""

    relay: Relay
    message: worker_pb2.AdoptedRequest


class Adoption:
    """Of one client request; `close` it."""

    def __init__(self, service: FrontendService, request_id: str) -> None:
        self._service = service
        self.request_id = request_id
        self.choices: dict[int, AdoptedChoice] = {}
        self.ticket: ResumeTicket | None = None
        self.on_overflow: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Relay, Loss[ApiError]], None] = self._fail
        self.mailbox = TokenMailbox(0, lambda: self.on_overflow())
        self.is_handed_on = False
        """A generation looks after the choices."""

    async def gather(self, key_name: str) -> ResumeTicket:
        """Take over what the workers have. Raises ApiError (404) if that is not the whole request, or another key's."""
        clock = self._service.clock
        give_up_s = clock() + PATIENCE_S
        while True:
            await self._service.pool.adopt(self.request_id, self._take, ANSWER_S)
            ticket = self.ticket
            if ticket is not None and ticket.key_name != key_name:
                self.close()
                raise stream_not_found(self.request_id)
            if ticket is not None and len(self.choices) >= ticket.choices:
                return ticket
            if clock() >= give_up_s:
                if self.choices:
                    log.error(
                        "a stream cannot be resumed: choices are missing",
                        extra={"request_id": self.request_id, "found": sorted(self.choices)},
                    )
                self.close()
                raise stream_not_found(self.request_id)
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Give back to the workers what nobody looks after, to be resumed once more."""
        if self.is_handed_on:
            return
        for choice in self.choices.values():
            self._service.pool.relays.release(choice.relay)
        self.choices.clear()

    def _take(self, sender: Incarnation, message: worker_pb2.AdoptedRequest) -> None:
        request = message.request
        try:
            ticket = decode_ticket(request.resume.ticket)
        except ValueError as error:
            log.error("a request cannot be resumed", extra={"request_id": request.request_id, "error": str(error)})
            return
        index = _choice_of(request.request_id, self.request_id)
        former = self.choices.get(index)
        if former is not None and former.message.request.epoch >= request.epoch:
            return
        if former is not None:  # an earlier life of it, that a recovery had left behind
            self._service.pool.relays.drop(former.relay)
        self.ticket = ticket
        relay = self._relay(index, message)
        self.choices[index] = AdoptedChoice(relay, message)
        cached = message.cached_tokens if message.HasField("cached_tokens") else None
        tokens = list(request.emitted_token_ids)
        self.mailbox.preload(
            Piece(index, tokens, (), message.finish_reason, cached), self._service.settings.max_pending_tokens
        )
        if message.is_ended:
            relay.request.go(RelayState.ENDED)
        else:
            self._service.pool.relays.adopted(relay, sender, request.epoch)

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
            emitted_token_ids=list(request.emitted_token_ids),
        )

    def _fail(self, relay: Relay, loss: Loss[ApiError]) -> None:
        self._service.pool.relays.fail(relay, loss.error)


def _choice_of(engine_request_id: str, client_request_id: str) -> int:
    """See `GenerationPlan.engine_request_id`."""
    suffix = engine_request_id.removeprefix(client_request_id).removeprefix("-")
    return int(suffix) if suffix.isdecimal() else 0
