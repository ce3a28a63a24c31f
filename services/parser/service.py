"""The gRPC service of the parser process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc

from mesh.errors import ConfigurationError
from penstock.v1 import parser_pb2, parser_pb2_grpc
from services.parser.interface import AnswerParser, ParserRefused, Parsers

log = logging.getLogger(__name__)

MAX_ANSWERS: Final = 4096
"""Read at once."""
TOKENS_A_TURN: Final = 32
"""Of one answer, before others get a turn."""


class ParserServicer(parser_pb2_grpc.ParserServicer):
    """Implements `penstock.v1.Parser`."""

    def __init__(self, parsers: Parsers) -> None:
        self._parsers = parsers
        self._answers = 0

    async def Load(self, request: parser_pb2.LoadParserRequest, context: Any) -> parser_pb2.LoadParserResponse:
        """Make sure of a model's parsers and, where that is wanted, of its rendering."""
        try:
            version = self._parsers.load(request.model)
            if request.renders:
                await self._parsers.load_renderer(request.model)
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return parser_pb2.LoadParserResponse(vllm_version=version)

    async def Render(self, request: parser_pb2.RenderChatRequest, context: Any) -> parser_pb2.RenderChatResponse:
        """The prompt of a chat."""
        try:
            return await self._parsers.render(request.model, request.body)
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort() raises")

    async def Prepare(self, request: parser_pb2.PrepareAnswerRequest, context: Any) -> parser_pb2.PrepareAnswerResponse:
        """What is changed of a request."""
        try:
            return self._parsers.prepare(request)
        except ParserRefused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort() raises")

    async def Read(
        self, requests: AsyncIterator[parser_pb2.ReadAnswerRequest], context: Any
    ) -> AsyncIterator[parser_pb2.ReadAnswerResponse]:
        """Each message of tokens is answered by one."""
        if self._answers >= MAX_ANSWERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_ANSWERS} answers are being read already")
        self._answers += 1
        parser: AnswerParser | None = None
        try:
            async for request in requests:
                if request.WhichOneof("kind") == "begin":
                    parser = await self._begin(request.begin, context)
                    continue
                if parser is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an answer begins with `begin`")
                assert parser is not None
                told = await read_tokens(parser, request.tokens)
                yield told
                if told.error or request.tokens.is_end:
                    return
        finally:
            self._answers -= 1

    async def _begin(self, begin: parser_pb2.BeginAnswer, context: Any) -> AnswerParser:
        try:
            return self._parsers.begin(begin)
        except (ParserRefused, ConfigurationError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort() raises")


async def read_tokens(parser: AnswerParser, tokens: parser_pb2.AnswerTokens) -> parser_pb2.ReadAnswerResponse:
    """All that some tokens add, each pushed by itself."""
    told = parser_pb2.ReadAnswerResponse()
    for number, (text, token_ids, is_last) in enumerate(_single(tokens), 1):
        try:
            add(told, parser.push(text, token_ids, is_last=is_last))
        # A library's parsers may fail in any way on what a model says; that is this answer's end and no other's.
        except Exception as error:
            log.exception("a parser failed on an answer")
            return parser_pb2.ReadAnswerResponse(error=f"{type(error).__name__}: {error}")
        if number % TOKENS_A_TURN == 0:
            await asyncio.sleep(0)
    return told


def _single(tokens: parser_pb2.AnswerTokens) -> Iterator[tuple[str, list[int], bool]]:
    count = max(len(tokens.texts), 1 if tokens.is_end else 0)
    for place in range(count):
        text = tokens.texts[place] if place < len(tokens.texts) else ""
        token_ids = list(tokens.token_ids[place : place + 1])
        yield text, token_ids, tokens.is_end and place == count - 1


def add(told: parser_pb2.ReadAnswerResponse, more: parser_pb2.ReadAnswerResponse) -> None:
    """Join what one token adds to what those before it do; arguments of one call become one piece."""
    told.reasoning += more.reasoning
    told.content += more.content
    if more.HasField("reasoning_tokens"):
        told.reasoning_tokens = more.reasoning_tokens
    for call in more.calls:
        if told.calls and told.calls[-1].index == call.index and not call.HasField("name"):
            told.calls[-1].arguments += call.arguments
        else:
            told.calls.append(call)
