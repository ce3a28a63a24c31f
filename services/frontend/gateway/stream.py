"""Envoy's external processing: one stream for each HTTP request that passes."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from controlplane.protocols.picking import (
    AnswerHeaders,
    Because,
    BodyLate,
    Closed,
    End,
    Event,
    Hang,
    Instruction,
    NotPicked,
    Pick,
    Picked,
    PickingManager,
    Piece,
    Refuse,
    RequestHeaders,
    RequestLate,
    SendAnswerHeaders,
    SendHeaders,
    SendPiece,
    SendTrailers,
    Trailers,
    Way,
)
from mesh.errors import IllegalTransition
from mesh.runtime import Clock, Entropy
from penstock.v1 import ext_proc_pb2 as envoy
from penstock.v1 import ext_proc_pb2_grpc
from services.frontend import errors
from services.frontend.errors import ApiError
from services.frontend.gateway.metrics import GatewayMetrics
from services.frontend.gateway.picker import Pick as PickedEndpoint
from services.frontend.gateway.picker import Picker
from services.frontend.gateway.settings import GatewaySettings
from services.frontend.gateway.usage import UsageReader
from services.frontend.http.errors import error_body
from services.frontend.http.exchange import INSTANCE_HEADER, POLICY_HEADER
from services.frontend.http.request_ids import MESH_ID_HEADER, REQUEST_ID_HEADER, new_request_id

log = logging.getLogger(__name__)

DESTINATION: Final = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE: Final = "envoy.lb"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
RETRY_AFTER_S: Final = 1.0
_OVERWRITE: Final = envoy.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class GatewayService(ext_proc_pb2_grpc.ExternalProcessorServicer):
    """Implements `envoy.service.ext_proc.v3.ExternalProcessor`."""

    def __init__(
        self, picker: Picker, settings: GatewaySettings, metrics: GatewayMetrics, clock: Clock, entropy: Entropy
    ) -> None:
        self.picker = picker
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.entropy = entropy
        self.active = 0
        """Streams that are open."""
        self.requests_total = 0
        self.held_bytes = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        metrics.streams.set_function(lambda: self.active)
        metrics.held_bytes.set_function(lambda: self.held_bytes)

    async def Process(self, request_iterator: Any, context: Any) -> None:
        """Pass one HTTP request. Reads and writes by hand: cheaper than iterating and yielding."""
        stream = _Stream(self, context)
        if self.active >= self.settings.max_streams:
            message = f"{self.active} requests pass already; try again later."
            await stream.refuse(errors.too_many_requests(message, "too_many_streams", RETRY_AFTER_S))
            return
        self.active += 1
        self.requests_total += 1
        self._is_idle.clear()
        try:
            await stream.run()
        except IllegalTransition as error:
            log.warning("what a gateway says makes no sense", extra={"error": str(error)})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            stream.close()
            self.active -= 1
            if not self.active:
                self._is_idle.set()

    async def idle(self) -> None:
        """Return when no stream is open."""
        await self._is_idle.wait()


class _Stream:
    """Carries out what the manager of one request says."""

    def __init__(self, service: GatewayService, context: Any) -> None:
        self._service = service
        self._context = context
        self._manager = PickingManager(service.settings.max_body_bytes)
        self._began_s = service.clock.now_s()
        self._headers: Mapping[str, str] = {}
        self._subset: Collection[str] | None = None
        self._pick: PickedEndpoint | None = None
        self._error: ApiError | None = None
        self._usage: UsageReader | None = None
        self._has_first_byte = False
        self._is_duplex = True
        """Whether what passes of an answer's body has to be given back, or only nodded to."""
        self._is_over = False
        self._held_bytes = 0
        """Of this request, as the service counts them."""

    async def run(self) -> None:
        """Until Envoy closes the stream, or the request is refused. Raises `IllegalTransition`."""
        while not self._is_over:
            event = await self._next()
            if event is None:
                return
            await self._carry_out(self._manager.handle(event))

    def close(self) -> None:
        """The stream is over, however it came to that."""
        for instruction in self._manager.handle(Closed()):
            if isinstance(instruction, End):
                self._end(instruction)
        self._count_held()

    async def refuse(self, error: ApiError) -> None:
        """Have Envoy answer the request with an error in OpenAI's form."""
        self._is_over = True
        self._service.metrics.refused.labels(str(error.status)).inc()
        headers = {"content-type": "application/json", **error.headers}
        immediate = envoy.ImmediateResponse(
            status=envoy.HttpStatus(code=error.status),
            headers=_mutation(headers),
            body=error_body(error),
            details=error.code or error.type,
        )
        await self._context.write(envoy.ProcessingResponse(immediate_response=immediate))

    async def _next(self) -> Event | None:
        """None: Envoy has closed the stream."""
        settings, is_coming = self._service.settings, self._manager.is_coming
        limit_s = settings.body_deadline_s if is_coming else settings.request_deadline_s
        left_s = self._began_s + limit_s - self._service.clock.now_s()
        try:
            async with asyncio.timeout(left_s):
                while True:
                    message = await self._context.read()
                    if message is grpc.aio.EOF:
                        return None
                    if (event := self._event(message)) is not None:
                        return event
        except TimeoutError:
            return BodyLate() if is_coming else RequestLate()

    def _event(self, message: envoy.ProcessingRequest) -> Event | None:
        """None for a message of a kind that is not known here."""
        match message.WhichOneof("request"):
            case "request_headers":
                return self._request_headers(message)
            case "request_body":
                body = message.request_body
                if self._manager.is_coming and self._service.held_bytes + len(body.body) > (
                    self._service.settings.max_held_bytes
                ):
                    self._error = errors.unavailable("Too many bodies wait for their endpoints; try again.")
                    return NotPicked()
                return Piece(Way.REQUEST, body.body, body.end_of_stream)
            case "request_trailers":
                return Trailers(Way.REQUEST)
            case "response_headers":
                return self._answer_headers(message)
            case "response_body":
                self._hear(message.response_body.body)
                return Piece(Way.ANSWER, message.response_body.body, message.response_body.end_of_stream)
            case "response_trailers":
                return Trailers(Way.ANSWER)
            case _:
                return None

    def _request_headers(self, message: envoy.ProcessingRequest) -> Event:
        self._headers = _headers(message.request_headers)
        self._subset = _subset(message)
        ends, hears_answer = message.request_headers.end_of_stream, True
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._is_duplex = modes.response_body_mode == envoy.FULL_DUPLEX_STREAMED
            hears_answer = modes.response_body_mode != envoy.NONE
            if modes.request_body_mode != envoy.FULL_DUPLEX_STREAMED and not ends:
                mode = envoy.BodySendMode.Name(modes.request_body_mode)
                log.error("Envoy sends bodies in a mode in which none can be read", extra={"mode": mode})
                self._error = ApiError(
                    500,
                    f"The gateway's external processing sends request bodies as {mode}: set request_body_mode to "
                    "FULL_DUPLEX_STREAMED.",
                    "server_error",
                    code="gateway_misconfigured",
                )
                return NotPicked()
        return RequestHeaders(ends, hears_answer)

    def _answer_headers(self, message: envoy.ProcessingRequest) -> Event:
        headers = _headers(message.response_headers)
        status = headers.get(":status", "")
        pick = self._pick
        if pick is not None and "content-encoding" not in headers:
            self._usage = UsageReader()
        served = _metadata(message, DESTINATION_NAMESPACE, SERVED)
        if pick is not None and isinstance(served, str) and served not in ("", pick.endpoints[0]):
            self._service.metrics.rerouted.labels(pick.model).inc()
            log.warning(
                "another endpoint served a request",
                extra={"request_id": pick.request_id, "picked": pick.endpoints[0], "served": served},
            )
        return AnswerHeaders(int(status) if status.isdecimal() else 0, message.response_headers.end_of_stream)

    def _hear(self, content: bytes) -> None:
        if self._pick is not None and content and not self._has_first_byte:
            self._has_first_byte = True
            since_s = self._service.clock.now_s() - self._began_s
            self._service.metrics.first_byte.labels(self._pick.model).observe(since_s)
        if self._usage is not None:
            self._usage.feed(content)

    async def _carry_out(self, instructions: list[Instruction]) -> None:
        self._count_held()
        # Before what is written: a write fails where Envoy has closed the stream in the meantime, and cuts this short.
        for end in instructions:
            if isinstance(end, End):
                self._end(end)
        for instruction in instructions:
            match instruction:
                case Pick(body):
                    await self._carry_out(self._manager.handle(await self._find(body)))
                case Refuse(because):
                    await self.refuse(self._error_of(because))
                case End():
                    pass
                case Hang():
                    self._is_over = True
                case _:
                    await self._context.write(self._response(instruction))

    async def _find(self, body: bytes) -> Picked | NotPicked:
        path = urlsplit(self._headers.get(":path", "")).path
        try:
            request_id = self._new_id()
            async with asyncio.timeout(self._service.settings.request_deadline_s):
                self._pick = await self._service.picker.pick(request_id, path, body, self._subset)
        except TimeoutError:
            self._error = errors.deadline_exceeded(self._service.settings.request_deadline_s)
        except ApiError as error:
            self._error = error
        except Exception:
            log.exception("no endpoint could be picked")
            self._error = errors.internal_error()
        else:
            return Picked(() if self._pick is None else self._pick.endpoints)
        return NotPicked()

    def _new_id(self) -> str:
        """With the client's own id of it, if that can be part of ours: to refuse it is the server's business."""
        entropy = self._service.entropy
        try:
            return new_request_id("gw", self._headers.get(REQUEST_ID_HEADER), entropy)
        except ApiError:
            return new_request_id("gw", None, entropy)

    def _response(self, instruction: Instruction) -> Message:
        match instruction:
            case SendHeaders(endpoints):
                return self._destination(endpoints)
            case SendAnswerHeaders():
                response = envoy.CommonResponse(header_mutation=_mutation(self._added_headers()))
                return envoy.ProcessingResponse(response_headers=envoy.HeadersResponse(response=response))
            case SendPiece(Way.REQUEST, content, ends):
                return envoy.ProcessingResponse(request_body=_body(content, ends=ends))
            case SendPiece(_, content, ends):
                body = _body(content, ends=ends) if self._is_duplex else envoy.BodyResponse()
                return envoy.ProcessingResponse(response_body=body)
            case SendTrailers(Way.REQUEST):
                return envoy.ProcessingResponse(request_trailers=envoy.TrailersResponse())
            case _:
                return envoy.ProcessingResponse(response_trailers=envoy.TrailersResponse())

    def _destination(self, endpoints: tuple[str, ...]) -> Message:
        """Without endpoints the header is taken away: no client is to choose one by itself."""
        if not endpoints:
            mutation = envoy.HeaderMutation(remove_headers=[DESTINATION])
            response = envoy.CommonResponse(header_mutation=mutation)
            return envoy.ProcessingResponse(request_headers=envoy.HeadersResponse(response=response))
        value = ",".join(endpoints)
        metadata = Struct()
        metadata.update({DESTINATION_NAMESPACE: {DESTINATION: value}})
        response = envoy.CommonResponse(header_mutation=_mutation({DESTINATION: value}))
        return envoy.ProcessingResponse(
            request_headers=envoy.HeadersResponse(response=response), dynamic_metadata=metadata
        )

    def _added_headers(self) -> dict[str, str]:
        """To the answer."""
        if self._pick is None:
            return {}
        return {
            MESH_ID_HEADER: self._pick.request_id,
            INSTANCE_HEADER: self._pick.instance_id,
            POLICY_HEADER: self._pick.policy,
        }

    def _error_of(self, because: Because) -> ApiError:
        match because:
            case Because.TOO_LARGE:
                return errors.body_too_large(self._service.settings.max_body_bytes)
            case Because.TOO_SLOW:
                return errors.body_timeout()
            case Because.NOT_PICKED:
                assert self._error is not None, "who did not pick says why"
                return self._error

    def _end(self, end: End) -> None:
        pick, metrics = self._pick, self._service.metrics
        if pick is None:
            return
        self._service.picker.ended(pick, end.ok, end.reason)
        usage = None if self._usage is None else self._usage.usage()
        if usage is not None:
            metrics.prompt_tokens.labels(pick.model).inc(usage.prompt_tokens)
            metrics.cached_tokens.labels(pick.model).inc(usage.cached_tokens)
            metrics.generated_tokens.labels(pick.model).inc(usage.generated_tokens)

    def _count_held(self) -> None:
        self._service.held_bytes += self._manager.held_bytes - self._held_bytes
        self._held_bytes = self._manager.held_bytes


def _headers(message: envoy.HttpHeaders) -> dict[str, str]:
    """The last one of a name, which is in lower case. Bytes that are no text stand as they can."""
    return {
        each.key: each.raw_value.decode("utf-8", "replace") if each.raw_value else each.value
        for each in message.headers.headers
    }


def _metadata(message: envoy.ProcessingRequest, namespace: str, key: str) -> Any:
    """A value of Envoy's unstructured metadata; None where there is none."""
    filters = message.metadata_context.filter_metadata
    if namespace not in filters or key not in filters[namespace].fields:
        return None
    return filters[namespace][key]


def _subset(message: envoy.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that may be picked; None: any."""
    given = _metadata(message, SUBSET_NAMESPACE, SUBSET)
    if given is None:
        return None
    listed = given.split(",") if isinstance(given, str) else given
    try:
        return frozenset(each.strip() for each in listed if isinstance(each, str) and each.strip())
    except TypeError:
        return frozenset()


def _mutation(headers: Mapping[str, str]) -> envoy.HeaderMutation:
    return envoy.HeaderMutation(
        set_headers=[
            envoy.HeaderValueOption(
                header=envoy.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
            )
            for name, value in headers.items()
        ]
    )


def _body(content: bytes, *, ends: bool) -> envoy.BodyResponse:
    streamed = envoy.StreamedBodyResponse(body=content, end_of_stream=ends)
    return envoy.BodyResponse(
        response=envoy.CommonResponse(body_mutation=envoy.BodyMutation(streamed_response=streamed))
    )
