"""The rest of a stream whose connection, or whose frontend, was lost."""

from typing import Final

from starlette.types import Receive, Scope, Send

from controlplane.model.adapter import Adapter
from services.frontend.answers.event_ids import Covered
from services.frontend.answers.sender import AnswerSender
from services.frontend.errors import bad_request
from services.frontend.http.exchange import ModelExchange
from services.frontend.requests.adoption import Adoption, SeenTokens
from services.frontend.requests.api_keys import ApiKey
from services.frontend.requests.generation import generating
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import GenerationPlan, Prompt
from services.frontend.requests.resume_ticket import ResumeTicket
from services.frontend.requests.service import FrontendService

EVENTS_PATH: Final = "/v1/requests/{request_id}/events"


async def resume(
    service: FrontendService, request_id: str, last_event_id: str | None, key: ApiKey | None, arrived_s: float
) -> "ResumeExchange":
    """Adopt a stream from whoever has it. Raises ApiError: 404 if nobody has all of it, 400 for an event id that is
    none of this stream, 503 if its model cannot be served here."""
    adoption = Adoption(service, request_id, _seen_tokens(last_event_id))
    ticket = await adoption.gather("" if key is None else key.name)
    try:
        asked = adoption.choices[0].message.request
        # A frontend that has just started may still be loading the tokenizer, or starting the parser process.
        model = await service.catalogue.asked_for(asked.model)
        if asked.HasField("adapter"):  # which may have been unloaded since
            adapter = asked.adapter
            model = model.adapted(Adapter(adapter.name, adapter.digest, adapter.path, adapter.is_3d_lora_weight))
        return ResumeExchange(service, adoption, ticket, model, last_event_id, key, arrived_s)
    except BaseException:
        adoption.close()
        raise


class ResumeExchange(ModelExchange):
    """The events of a stream behind the last one that its client has seen."""

    def __init__(
        self,
        service: FrontendService,
        adoption: Adoption,
        ticket: ResumeTicket,
        model: ServedModel,
        last_event_id: str | None,
        key: ApiKey | None,
        arrived_s: float,
    ) -> None:
        """`adoption` has all choices, and of each as much as its client has seen. Raises ApiError (400) for an event id
        that is none of this stream."""
        self._covered = _covered(last_event_id, adoption)
        super().__init__(service, ticket.request, adoption.request_id, model, key, arrived_s)
        self._created_unix_s = ticket.created_unix_s
        self._adoption = adoption
        self._ticket = ticket
        prompts = (adoption.choices[number * ticket.n].message.request for number in range(len(ticket.echoes)))
        seen = 0 if self._covered is None else sum(self._covered.tokens)
        # What the client has not seen may have been generated while nobody read it, and is charged here.
        self._tokens_charged_before = sum(len(each.prompt_token_ids) for each in prompts) + seen
        self.wants_ids = True
        self.may_return = True  # who has come back once may do so again

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; what was adopted and is not looked after goes back to its worker, whatever happens."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()

    def close(self) -> None:
        """Give back to the workers what nobody looks after."""
        self._adoption.close()

    async def _generate(self, sender: AnswerSender, scope: Scope) -> None:
        started_s = self._adoption.choices[0].relay.started_s
        client = self._client(scope)
        async with generating(self._service, self._plan(), started_s, client, adoption=self._adoption) as run:
            self._service.metrics.resumed_streams.inc()
            await self._answer(sender, run.generation, self._covered, is_resumed=True)

    def _plan(self) -> GenerationPlan:
        ticket, choices = self._ticket, self._adoption.choices
        requests = [choices[number * ticket.n].message.request for number in range(len(ticket.echoes))]
        return GenerationPlan(
            self.request_id,
            self._model,
            tuple(
                Prompt(list(request.prompt_token_ids), request.sampling, echo)
                for request, echo in zip(requests, ticket.echoes, strict=True)
            ),
            ticket.n,
            ticket.request.seed,
            ticket.request.stop_strings,
            ticket.request.priority or 0,
            requests[0].cache_salt,
            requests[0].resume.ticket,
            read_by=ticket.read_by,
            is_rendered_outside=ticket.is_rendered_outside,
        )

    def _endpoint(self, scope: Scope) -> str:
        return EVENTS_PATH


def _seen_tokens(last_event_id: str | None) -> SeenTokens:
    """What an event id says that its client has. One that is of no stream with so many choices says nothing here:
    `ResumeExchange` refuses it."""

    def seen(index: int, choices: int) -> int:
        try:
            return Covered.parse(last_event_id, choices).tokens[index] if last_event_id else 0
        except (ValueError, IndexError):
            return 0

    return seen


def _covered(last_event_id: str | None, adoption: Adoption) -> Covered | None:
    if not last_event_id:
        return None
    try:
        return Covered.parse(last_event_id, len(adoption.choices))
    except ValueError as error:
        raise bad_request(f"Invalid `Last-Event-ID`: {error}.", "last-event-id") from error
