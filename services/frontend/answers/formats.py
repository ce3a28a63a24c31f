"""What an answer looks like to a client, in the form of the endpoint that was asked: one object for a whole answer, one
event for each chunk of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock.v1 import request_pb2
from services.frontend.answers.choice import ChoicePiece, Finish, TokenPosition
from services.frontend.answers.schema import (
    CascadeFacts,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TopLogprob,
    Usage,
)
from services.frontend.answers.sse import ChunkEnvelope, encode, event
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.schema import ChatCompletionRequest, GenerationRequest
from services.frontend.text.model_text import ModelText

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI documents this value for very unlikely tokens."""


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """What is the same in every part of an answer."""

    request_id: str
    created_unix_s: int
    model: str
    text: ModelText
    logprobs: bool
    """Whether the client asked for them."""
    include_usage: bool
    """Whether a stream ends with the usage."""
    cascade: CascadeFacts | msgspec.UnsetType = msgspec.UNSET
    """How a cascade came to the answer."""


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """A choice that has ended, for an answer that is not streamed."""

    index: int
    text: str
    positions: Sequence[TokenPosition]
    finish: Finish


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """The only choice of an answer that is known as a whole before any of it is sent."""

    text: str
    positions: Sequence[TokenPosition]
    finish: Finish
    usage: Usage


class StreamFormat(Protocol):
    """Encodes the events of one streamed answer: call the methods in the order in which they stand here."""

    def first_events(self) -> bytes:
        """What a stream begins with, before any token; may be empty."""

    def event(self, piece: ChoicePiece) -> bytes:
        """The chunk that brings a piece."""

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk, where the client asked for it."""


class AnswerFormat(StreamFormat, Protocol):
    """Encodes the answer to one request, streamed or whole."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


def answer_format(request: GenerationRequest, header: AnswerHeader, plan: GenerationPlan) -> AnswerFormat:
    """For the answers to `request`, which `plan` was made from."""
    choices = len(plan.prompts) * plan.n
    echoes = [plan.prompts[choice // plan.n].echo for choice in range(choices)]
    return (
        ChatFormat(header, echoes) if isinstance(request, ChatCompletionRequest) else CompletionFormat(header, echoes)
    )


class ChatFormat:
    """The `AnswerFormat` of /v1/chat/completions."""

    def __init__(self, header: AnswerHeader, echoes: Sequence[str]) -> None:
        """`echoes`: what the text of each choice begins with."""
        self._header = header
        self._echoes = echoes
        self._chunk = ChatCompletionChunk(
            header.request_id, header.created_unix_s, header.model, [], penstock=header.cascade
        )
        if header.include_usage:
            self._chunk.usage = None
        self._envelope = ChunkEnvelope(self._chunk, len(echoes), b'"delta":{"content":', b"},")

    def first_events(self) -> bytes:
        """One chunk for each choice that says its role, as OpenAI sends before any text, and brings what is echoed."""
        roles = (
            ChatChunkChoice(index, ChatDelta(role="assistant", content=echo), None, None)
            for index, echo in enumerate(self._echoes)
        )
        return b"".join([self._envelope.choice_event(role) for role in roles])

    def event(self, piece: ChoicePiece) -> bytes:
        """The chunk for one piece; without logprobs and finish reason it is put together from encoded parts."""
        if piece.finish is None and not self._header.logprobs:
            return self._envelope.text_event(piece.index, piece.text)
        delta = ChatDelta(content=piece.text or None)
        choice = ChatChunkChoice(piece.index, delta, self._logprobs(piece.positions), piece.finish)
        return self._envelope.choice_event(choice)

    def usage_event(self, usage: Usage) -> bytes:
        """The chunk without choices that `stream_options.include_usage` asks for."""
        return event(encode(msgspec.structs.replace(self._chunk, usage=usage)))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The `chat.completion` object."""
        header = self._header
        listed = [
            ChatChoice(
                choice.index,
                ChatMessage(self._echoes[choice.index] + choice.text),
                self._logprobs(choice.positions),
                choice.finish,
            )
            for choice in choices
        ]
        return encode(
            ChatCompletion(
                header.request_id, header.created_unix_s, header.model, listed, usage, penstock=header.cascade
            )
        )

    def _logprobs(self, positions: Sequence[TokenPosition]) -> ChatLogprobs | None:
        return chat_logprobs(positions, self._header.text) if self._header.logprobs else None


class CompletionFormat:
    """The `AnswerFormat` of /v1/completions."""

    def __init__(self, header: AnswerHeader, echoes: Sequence[str]) -> None:
        """`echoes`: what the text of each choice begins with."""
        self._header = header
        self._echoes = echoes
        self._chunk = Completion(header.request_id, header.created_unix_s, header.model, [], penstock=header.cascade)
        if header.include_usage:
            self._chunk.usage = None
        self._envelope = ChunkEnvelope(self._chunk, len(echoes), b'"text":', b",")

    def first_events(self) -> bytes:
        """The prompts that the client asked to have echoed, one chunk for each choice; empty without `echo`."""
        echoed = ((index, echo) for index, echo in enumerate(self._echoes) if echo)
        return b"".join([self._envelope.text_event(index, echo) for index, echo in echoed])

    def event(self, piece: ChoicePiece) -> bytes:
        """The chunk for one piece; without logprobs and finish reason it is put together from encoded parts."""
        if piece.finish is None and not self._header.logprobs:
            return self._envelope.text_event(piece.index, piece.text)
        return self._envelope.choice_event(self._choice(piece.index, piece.text, piece.positions, piece.finish))

    def usage_event(self, usage: Usage) -> bytes:
        """The chunk without choices that `stream_options.include_usage` asks for."""
        return event(encode(msgspec.structs.replace(self._chunk, usage=usage)))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The `text_completion` object, each echoed prompt in front of its text."""
        listed = [
            self._choice(choice.index, self._echoes[choice.index] + choice.text, choice.positions, choice.finish)
            for choice in choices
        ]
        return encode(msgspec.structs.replace(self._chunk, choices=listed, usage=usage))

    def _choice(
        self, index: int, text: str, positions: Sequence[TokenPosition], finish: Finish | None
    ) -> CompletionChoice:
        logprobs = completion_logprobs(positions, self._header.text) if self._header.logprobs else None
        return CompletionChoice(index, text, logprobs, finish)


def chat_logprobs(positions: Sequence[TokenPosition], text: ModelText) -> ChatLogprobs:
    """`choices[].logprobs` of a chat completion, with the UTF-8 bytes of every token."""
    return ChatLogprobs([_chat_entry(position.logprobs, text) for position in positions])


def completion_logprobs(positions: Sequence[TokenPosition], text: ModelText) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion; `text_offset` counts characters from the answer's start."""
    return CompletionLogprobs(
        tokens=[text.token_text(position.logprobs.chosen.token_id)[0] for position in positions],
        token_logprobs=[_finite(position.logprobs.chosen.logprob) for position in positions],
        top_logprobs=[
            {text.token_text(rival.token_id)[0]: _finite(rival.logprob) for rival in position.logprobs.top}
            for position in positions
        ],
        text_offset=[position.text_offset for position in positions],
    )


def _chat_entry(logprobs: request_pb2.PositionLogprobs, text: ModelText) -> ChatTokenLogprob:
    chosen = _top(logprobs.chosen, text)
    return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, [_top(rival, text) for rival in logprobs.top])


def _top(token: request_pb2.TokenLogprob, text: ModelText) -> TopLogprob:
    spelled, spelled_bytes = text.token_text(token.token_id)
    return TopLogprob(spelled, _finite(token.logprob), list(spelled_bytes))


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
