"""One answer that the parser process reads, and reads anew where a process is lost."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, TypeAlias

import grpc
import msgspec
from xxhash import xxh3_64

from mesh.errors import ConfigurationError, RpcError
from penstock.v1 import parser_pb2
from services.frontend.errors import ApiError, bad_request, unavailable, upstream_failed
from services.frontend.parser_process.process import CALL_DEADLINE_S, MAX_FAILURES, Life, ParserProcess
from services.frontend.parsers.deltas import DeltaBuilder, MessageDelta

log = logging.getLogger(__name__)

TOKENS_A_MESSAGE: Final = 256
ANSWER_DEADLINE_S: Final = 30.0
"""For one message of tokens, behind those of other answers. A process that takes longer hangs."""
Part: TypeAlias = tuple[str, Sequence[int]]
"""A token, by itself in a list, with the text that it lets be shown; without a token at an answer's end only."""


class ParserRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the parsers have to know of a request. Goes along in its ticket, for a frontend that resumes its stream."""

    body: str
    """As vLLM takes it, without messages."""
    earlier_calls: int = 0
    """In its messages."""
    shows_special_tokens: bool = False


class OutsideParsers:
    """The parsers of one model, in the process."""

    def __init__(self, process: ParserProcess, model: parser_pb2.ParserModel) -> None:
        self._process = process
        self._model = model

    @property
    def names(self) -> tuple[str, str]:
        """vLLM's names of the parsers of tools and reasoning; empty: none."""
        return self._model.tool_parser, self._model.reasoning_parser

    @property
    def reads_reasoning(self) -> bool:
        """Reasoning is told apart."""
        return bool(self._model.reasoning_parser)

    async def prepare(self, body: str, earlier_calls: int) -> tuple[ParserRequest, str]:
        """What the answers are read by, and what their text must fit, as engines are told. Raises ApiError."""
        request = parser_pb2.PrepareAnswerRequest(model=self._model, body=body, earlier_calls=earlier_calls)
        try:
            prepared = await self._process.ask(lambda stub: stub.Prepare(request, timeout=CALL_DEADLINE_S))
        except (RpcError, ConfigurationError) as error:
            raise unavailable(f"This model's answers cannot be read now: {error}.", "parser_failed") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise bad_request(f"vLLM's parser refuses the request: {error.details()}", "tools") from error
            message = f"vLLM's parser could not prepare the request: {error.details()}"
            raise upstream_failed(message, "parser_failed") from error
        read_by = ParserRequest(body, earlier_calls, prepared.shows_special_tokens)
        return read_by, prepared.structured_outputs

    def answer(
        self,
        request: ParserRequest,
        prompt_token_ids: Sequence[int],
        answer_id: str,
        deadline_s: float,
        *,
        is_whole: bool,
    ) -> "OutsideAnswer":
        """For one answer; nothing is asked before its first token. `deadline_s`: of all of it."""
        begin = parser_pb2.BeginAnswer(
            model=self._model,
            body=request.body,
            earlier_calls=request.earlier_calls,
            prompt_token_ids=prompt_token_ids,
            is_whole=is_whole,
            answer_id=answer_id,
        )
        self._process.count_answer()
        return OutsideAnswer(self._process, begin, deadline_s)


class _Lost(Exception):
    """The process, or the way to it."""


class _Fingerprint:
    """What was told of an answer, however it was cut, as hashes."""

    def __init__(self) -> None:
        self._hashes: dict[str, xxh3_64] = {}

    def add(self, delta: MessageDelta) -> None:
        for name, text in (("reasoning", delta.reasoning), ("content", delta.content)):
            self._update(name, text)
        for call in delta.calls:
            self._update(f"call {call.index}", f"{call.name}\0" if call.name is not None else "")
            self._update(f"call {call.index}", call.arguments)

    def _update(self, name: str, text: str) -> None:
        if text:
            self._hashes.setdefault(name, xxh3_64()).update(text.encode("utf-8", "surrogatepass"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fingerprint) and self._digests() == other._digests()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def _digests(self) -> dict[str, bytes]:
        return {name: one.digest() for name, one in self._hashes.items()}


class OutsideAnswer:
    """Keeps its tokens until the end: where the process is lost, the next one reads them all anew, and what the client
    has is left out. Call `read` after `read`; `close` it."""

    def __init__(self, process: ParserProcess, begin: parser_pb2.BeginAnswer, deadline_s: float) -> None:
        self._process = process
        self._begin = begin
        self._deadline_s = deadline_s
        self._parts: list[Part] = []
        self._told = _Fingerprint()
        self._life: Life | None = None
        self._call: grpc.aio.StreamStreamCall | None = None
        self._failures = 0

    async def read(self, parts: Sequence[Part], *, is_end: bool) -> MessageDelta:
        """What these tokens add. Raises ApiError if they cannot be read."""
        known = len(self._parts)
        self._parts += parts
        while True:
            try:
                if self._call is not None and self._life is not None and not self._life.ended:
                    delta = await self._exchange(known, len(self._parts), is_end=is_end)
                elif self._failures:
                    async with self._process.replaying:
                        delta = await self._anew(known, is_end=is_end)
                else:
                    delta = await self._anew(known, is_end=is_end)
                break
            except _Lost as lost:
                self.close()
                self._failures += 1
                log.warning("an answer is read anew", extra={"answer": self._begin.answer_id, "reason": str(lost)})
                if self._failures >= MAX_FAILURES:
                    raise self._failed(f"it was lost {MAX_FAILURES} times over this answer ({lost})") from lost
        self._failures = 0
        self._told.add(delta)
        return delta

    def close(self) -> None:
        """Nothing more is read."""
        if self._call is not None:
            self._call.cancel()
        self._call = self._life = None

    async def _anew(self, known: int, *, is_end: bool) -> MessageDelta:
        try:
            self._life = await self._process.life()
        except (RpcError, ConfigurationError) as error:
            raise _Lost(str(error)) from error
        self._call = self._life.stub.Read(timeout=self._deadline_s)
        try:
            await self._call.write(parser_pb2.ReadAnswerRequest(begin=self._begin))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._lost(error) from error
        if known:
            self._process.count_replay()
            told = _Fingerprint()
            told.add(await self._exchange(0, known, is_end=False))
            if told != self._told:
                raise self._failed("a second reading of this answer differs from the first")
        return await self._exchange(known, len(self._parts), is_end=is_end)

    async def _exchange(self, start: int, end: int, *, is_end: bool) -> MessageDelta:
        to = DeltaBuilder()
        while True:
            until = min(end, start + TOKENS_A_MESSAGE)
            told = await self._answered(self._parts[start:until], is_end=is_end and until == end)
            to.reason(told.reasoning)
            to.say(told.content)
            for call in told.calls:
                to.call(call.index, call.name if call.HasField("name") else None, call.arguments, call.id)
            if told.HasField("reasoning_tokens"):
                to.reasoning_tokens = told.reasoning_tokens
            start = until
            if start >= end:
                return to.built()

    async def _answered(self, parts: Sequence[Part], *, is_end: bool) -> parser_pb2.ReadAnswerResponse:
        assert self._call is not None, "_anew() has begun the answer"
        assert self._life is not None, "the same"
        tokens = parser_pb2.AnswerTokens(
            token_ids=[token_id for _, ids in parts for token_id in ids],
            texts=[text for text, _ in parts],
            is_end=is_end,
        )
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                await self._call.write(parser_pb2.ReadAnswerRequest(tokens=tokens))
                told = await self._call.read()
        except TimeoutError as error:
            self._process.kill(self._life, f"it did not answer within {ANSWER_DEADLINE_S:g} s")
            raise _Lost("it did not answer") from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._lost(error) from error
        if not isinstance(told, parser_pb2.ReadAnswerResponse):  # grpc.aio.EOF
            raise self._failed("the parser process ended the answer")
        if told.error:
            raise self._failed(told.error)
        return told

    def _lost(self, error: grpc.aio.AioRpcError | asyncio.InvalidStateError) -> Exception:
        """Why a call has ended: with its process, of which nobody else may have heard yet, or for a reason of its own,
        which would come again."""
        assert self._life is not None, "there is a call"
        if isinstance(error, asyncio.InvalidStateError) or error.code() is grpc.StatusCode.UNAVAILABLE:
            self._process.kill(self._life, "its connection has ended")
            return _Lost("its connection has ended")
        return self._failed(error.details() or error.code().name)

    def _failed(self, reason: str) -> ApiError:
        log.error("an answer cannot be read", extra={"answer": self._begin.answer_id, "reason": reason})
        return upstream_failed(f"vLLM's parser could not read this answer: {reason}.", "parser_failed")
