"""A generation over HTTP, from the checked request to the last byte, as a raw ASGI response.

Raw ASGI because whatever wraps a response costs per chunk: one middleware doubles the price of a chunk.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.answers.choice import ChoicePiece, choice_text
from services.frontend.answers.event_ids import Covered, EventIds
from services.frontend.answers.formats import AnswerHeader, answer_format
from services.frontend.answers.outside import OutsidePieces
from services.frontend.answers.reader import AnswerReader
from services.frontend.answers.schema import Usage
from services.frontend.answers.sender import AnswerSender, PieceSource
from services.frontend.errors import ApiError, internal_error
from services.frontend.http.errors import error_body, error_response
from services.frontend.http.load_header import load_header
from services.frontend.http.request_ids import MESH_ID_HEADER, REQUEST_ID_HEADER
from services.frontend.http.server import abort_connection
from services.frontend.media.service import MediaLoader
from services.frontend.metrics import ABORTED, FAILED
from services.frontend.requests.api_keys import ApiKey, tenant_of
from services.frontend.requests.ended import Asked, Progress, Tokens
from services.frontend.requests.generation import Client, Generation, generating
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import GenerationPlan, plan_request
from services.frontend.requests.resume_ticket import encode_ticket
from services.frontend.requests.schema import GenerationRequest
from services.frontend.requests.service import FrontendService
from services.frontend.requests.structure import refused_structure
from services.frontend.requests.unsupported import tellable

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's status for a client that left before its answer."""
WITHOUT_EFFECT_HEADER: Final = "x-penstock-without-effect"
"""Names of parameters that were given and change nothing."""
INSTANCE_HEADER: Final = "x-penstock-instance"
POLICY_HEADER: Final = "x-penstock-policy"


def without_effect_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names parameters without effect, where there are any that may stand in one."""
    told = tellable(names)
    return {WITHOUT_EFFECT_HEADER: ", ".join(told)} if told else {}


class Exchange(Response, ABC):
    """Serves one request when the ASGI server calls it. A client that leaves cancels all of it at once."""

    def __init__(
        self,
        service: FrontendService,
        request: GenerationRequest,
        request_id: str,
        model_name: str,
        key: ApiKey | None,
        arrived_s: float,
    ) -> None:
        # Not Response.__init__, which encodes a body: there is none yet.
        self.background = None
        self._service = service
        self._request = request
        self.request_id = request_id
        """By which the mesh knows it."""
        self.told_id = request_id
        """The `x-request-id` of the answer: the client's own, if it gave one."""
        self.without_effect: Sequence[str] = ()
        """Parameters that the client is told of in a header."""
        self.traceparent = ""
        """What its spans are a part of: the client's, at first."""
        self._model_name = model_name
        self._key = key
        self._arrived_s = arrived_s
        self._client_left = False
        self._progress = Progress()
        self._tokens_charged_before = 0
        """Of a stream that is resumed: to its first connection."""
        self.load_format = ""
        """How the client wants the load of the instances in a header; empty: not at all."""
        self.wants_ids = False
        """The events of a stream are to have ids, by which it can be resumed."""
        self.may_return = False
        """The client has said that it comes back for the rest if its connection ends."""
        self.on_planned: Callable[[], None] = lambda: None
        """Called once the request is admitted and its prompts are known to fit."""
        self.token_by_token = False
        """Its text is cut into chunks by tokens alone, and so in the same places whenever it is written anew."""
        self.sampling_defaults: Mapping[str, Any] = {}
        """Of the model, for requests that leave them out."""
        self.reads_parts = False
        """The model's chat template goes through the parts of a message."""
        self.knows_tools = True
        """Prompts of the model have a place for tools."""
        self.tool_parser = ""
        """The model's."""
        self.max_tokens: int | None = None
        """Of the longest answer that there may be, once it is known."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and count the request under the status that its answer ended with."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.ensure_future(self._watch(receive, task))
        status = CLIENT_CLOSED_REQUEST
        try:
            status = await self._serve(scope, receive, send)
        except asyncio.CancelledError:
            if not self._client_left:
                raise
            task.uncancel()
            self._service.metrics.disconnects.inc()
        finally:
            watch.cancel()
            self._count(self._endpoint(scope), status)

    async def _watch(self, receive: Receive, task: asyncio.Task[None]) -> None:
        """The body was read, so the next thing to be received is that the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_left = True
        task.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        """The status that the answer ended with."""
        sender = AnswerSender(send)
        sender.headers[REQUEST_ID_HEADER] = self.told_id
        sender.headers[MESH_ID_HEADER] = self.request_id
        sender.headers |= without_effect_header(self.without_effect)
        if self.load_format:
            sender.late_headers = self._load_header
        service = self._service
        with service.tracer.span(self._endpoint(scope), self.traceparent, start_s=self._arrived_s) as span:
            span.set(request_id=self.request_id, model=self._model_name)
            self.traceparent = span.traceparent
            failure = await self._answered(sender, scope)
            span.set(status=200 if failure is None else failure.status)
            span.end("" if failure is None else failure.message)
        if failure is None:
            return 200
        if sender.started:
            await sender.fail(error_body(failure))
        else:
            failure.headers = {**failure.headers, **sender.headers}
            await error_response(failure)(scope, receive, send)
        return failure.status

    async def _answered(self, sender: AnswerSender, scope: Scope) -> ApiError | None:
        """None, or why there is no answer, or not all of it."""
        service = self._service
        try:
            with service.counted(self._key), service.tracer.child("queue", self.traceparent) as queue:
                async with service.gate.admitted(
                    self, self._request.priority or 0, self._left_s(), tenant_of(self._key), lambda: self._tokens_taken
                ):
                    queue.end()
                    self._progress.admitted_s = service.clock()
                    await self._generate(sender, scope)
            return None
        except ApiError as error:
            return error
        # The last line of defence: a bug must cost one request, say so in the log and tell the client.
        except Exception:
            log.exception("a request failed by a bug", extra={"request_id": self.request_id})
            return internal_error()

    @abstractmethod
    async def _generate(self, sender: AnswerSender, scope: Scope) -> None:
        """Answer the admitted request. Raises ApiError."""

    @property
    def model(self) -> str:
        """The name that was asked for, or that of the only model."""
        return self._request.model

    @property
    def _models(self) -> Sequence[str]:
        """Whose instances may answer."""
        return (self._model_name,)

    async def _load_header(self) -> Mapping[str, str]:
        reading = await self._service.mesh_metrics.read()
        return load_header(self.load_format, reading.load(self._models))

    @property
    def _include_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        options = self._request.stream_options
        return options is not None and bool(options.include_usage)

    def _client(self, scope: Scope) -> Client:
        return Client(
            self._left_s, partial(abort_connection, scope), self.may_return, self.traceparent, tenant_of(self._key)
        )

    def _endpoint(self, scope: Scope) -> str:
        """The label of the requests metric: a path without ids, so that there are few."""
        path: str = scope["path"]
        return path

    @property
    def _owner(self) -> str:
        return "" if self._key is None else self._key.name

    @property
    def _tokens_taken(self) -> int:
        taken = self._progress.tokens.prompt + self._progress.tokens.generated
        return max(0, taken - self._tokens_charged_before)

    def _left_s(self) -> float:
        return self._arrived_s + self._service.settings.request_deadline_s - self._service.clock()

    def _count(self, endpoint: str, status: int) -> None:
        service = self._service
        service.spent(self._key, self._tokens_taken)
        service.requests_total += 1
        service.metrics.requests.labels(self._model_name, endpoint, str(status)).inc()
        now_s = service.clock()
        service.metrics.of(self._model_name).e2e.observe(now_s - self._arrived_s)
        asked = Asked(self.request_id, self._model_name, endpoint, self._owner, self._arrived_s)
        service.used(asked, self._progress, status)
        service.ended.add(asked, self._progress, status, now_s, service.unix_time())


class ModelExchange(Exchange):
    """One model's answer, as it comes."""

    def __init__(
        self,
        service: FrontendService,
        request: GenerationRequest,
        request_id: str,
        model: ServedModel,
        key: ApiKey | None,
        arrived_s: float,
    ) -> None:
        super().__init__(service, request, request_id, model.engine_model, key, arrived_s)
        self._model = model
        self.others: Sequence[GenerationRequest] | None = None
        """Further conversations of a batch, each of which gets a choice behind that of the first; None: it is none."""
        self.sampling_defaults = model.sampling_defaults
        self.tool_parser = model.tool_call_parser
        if (template := model.text.template) is not None:
            self.reads_parts = template.takes_parts
            self.knows_tools = (model.text.tool_template or template).knows_tools
        self._created_unix_s = int(service.unix_time())

    async def _generate(self, sender: AnswerSender, scope: Scope) -> None:
        service = self._service
        with service.media.held(service.clock() + self._left_s(), self._owner) as media:
            await self._generate_with(media, sender, scope)

    async def _generate_with(self, media: MediaLoader, sender: AnswerSender, scope: Scope) -> None:
        service = self._service
        if self.others is None:
            plan = await self._planned(self._request, media)
        else:
            plan = await self._planned_batch((self._request, *self.others), media)
        self.max_tokens = plan.prompts[0].sampling.max_tokens
        metrics = service.metrics.of(self._model.engine_model)
        metrics.asked_choices.observe(plan.n)
        metrics.asked_max_tokens.observe(self.max_tokens)
        plan = replace(plan, ticket=encode_ticket(self._request, plan, self._key, self._created_unix_s))
        self.on_planned()
        try:
            async with generating(service, plan, self._arrived_s, self._client(scope)) as run:
                await self._answer(sender, run.generation)
        except ApiError as error:
            if plan.structure_param:
                raise refused_structure(error, plan.structure_param) from error
            raise

    async def _planned(self, request: GenerationRequest, media: MediaLoader) -> GenerationPlan:
        service = self._service
        return await plan_request(
            request, self.request_id, self._model, service.settings.max_choices, service.threads, media
        )

    async def _planned_batch(self, requests: Sequence[GenerationRequest], media: MediaLoader) -> GenerationPlan:
        plans = []
        for index, request in enumerate(requests):
            try:
                plans.append(await self._planned(request, media))
            except ApiError as error:
                raise in_batch(error, index) from error
        return replace(
            plans[0],
            prompts=tuple(prompt for each in plans for prompt in each.prompts),
            is_rendered_outside=any(each.is_rendered_outside for each in plans),
        )

    async def _answer(
        self,
        sender: AnswerSender,
        generation: Generation,
        covered: Covered | None = None,
        *,
        is_resumed: bool = False,
    ) -> None:
        """`covered`: what the client has of a stream that it resumes."""
        texts = [choice_text(self._request, generation.plan, relay.index) for relay in generation.relays]
        metrics, clock = self._service.metrics.of(self._model.engine_model), self._service.clock
        self._progress.placed(generation.instance_ids, generation.policies, clock())
        form = answer_format(self._request, self._header(generation.plan), generation.plan)
        outside: OutsidePieces | None = None

        def on_covered(piece: ChoicePiece) -> None:
            form.covered(piece) if outside is None else outside.covered(piece)

        reader = AnswerReader(
            generation,
            texts,
            metrics.ttft,
            metrics.inter_token,
            clock,
            covered,
            on_covered,
            is_resumed=is_resumed,
            token_by_token=self.token_by_token,
        )
        source: PieceSource = reader
        if generation.plan.read_by is not None:
            deadline_s = self._service.settings.request_deadline_s
            source = outside = OutsidePieces(reader, generation.plan, deadline_s, is_whole=not self._request.stream)
        sender.headers[INSTANCE_HEADER] = ",".join(dict.fromkeys(generation.instance_ids))
        sender.headers[POLICY_HEADER] = ",".join(dict.fromkeys(generation.policies))
        unfinished = FAILED
        try:
            if self._request.stream:
                ids, usage = self._event_ids(generation.plan, covered), self._usage_wanted(reader, covered)
                await sender.stream(
                    source, form, usage, ids, first_events_had=0 if covered is None else covered.first_events
                )
            else:
                await sender.whole(source, form, len(texts), reader.usage)
        except asyncio.CancelledError:
            unfinished = ABORTED
            raise
        finally:
            if outside is not None:
                outside.close()
            self._progress.ended(generation.relays, _tokens(reader.usage()), reader.first_s)
            self._count_tokens(reader, 0 if covered is None else sum(covered.tokens))
            self._count_choices(reader, unfinished)

    def _event_ids(self, plan: GenerationPlan, covered: Covered | None) -> EventIds | None:
        """By which the stream can be resumed; None if it cannot be, or its client does not want them."""
        if not plan.ticket or not self.wants_ids:
            return None
        ids = EventIds(len(plan.prompts) * plan.n)
        if covered is not None:
            ids.start(covered)
        return ids

    def _usage_wanted(self, reader: AnswerReader, covered: Covered | None) -> Callable[[], Usage] | None:
        """None where the client does not want the usage, or has it."""
        has_it = covered is not None and covered.usage
        return reader.usage if self._include_usage and not has_it else None

    def _header(self, plan: GenerationPlan) -> AnswerHeader:
        return AnswerHeader(
            request_id=plan.request_id,
            created_unix_s=self._created_unix_s,
            model=plan.model.name,
            text=plan.model.text,
            logprobs=plan.prompts[0].sampling.HasField("logprobs"),
            include_usage=self._include_usage,
        )

    def _count_tokens(self, reader: AnswerReader, sent_before: int) -> None:
        usage, metrics = reader.usage(), self._service.metrics.of(self._model.engine_model)
        metrics.generated_tokens.inc(max(0, usage.completion_tokens - sent_before))
        metrics.cached_tokens.inc(usage.cached_tokens)
        metrics.request_prompt_tokens.observe(usage.prompt_tokens)
        metrics.request_generated_tokens.observe(usage.completion_tokens)
        metrics.computed_prompt_tokens.observe(usage.prompt_tokens - usage.cached_tokens)

    def _count_choices(self, reader: AnswerReader, unfinished: str) -> None:
        """`unfinished`: how choices ended that have no end of their own. A client that has said that it may come back
        for them has not ended them."""
        metrics = self._service.metrics.of(self._model.engine_model)
        ends = [finish or unfinished for finish in reader.finishes]
        for end in ends:
            if end != ABORTED or not self.may_return:
                metrics.finished[end].inc()
        metrics.longest_choice_tokens.observe(max(reader.choice_tokens))
        for mean_s in reader.mean_token_s():
            metrics.time_per_output_token.observe(mean_s)


def _tokens(usage: Usage) -> Tokens:
    return Tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def in_batch(error: ApiError, index: int) -> ApiError:
    """The error of one conversation as one of the batch's `messages`."""
    if error.param is not None and error.param.partition("[")[0] == "messages":
        error.param = f"messages[{index}]{error.param.removeprefix('messages')}"
    return error
