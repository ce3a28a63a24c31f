"""What an answer looks like to a client, in the form of the endpoint that was asked: one object for a whole answer, one
event for each chunk of a stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from penstock.v1 import request_pb2
from services.frontend.answers.choice import ChoicePiece, Finish, TokenPosition
from services.frontend.answers.logprobs import (
    Speller,
    chat_entry,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from services.frontend.answers.message_text import (
    MessageReading,
    MessageText,
    call_id,
    message_reading,
    tells_reasoning_tokens,
)
from services.frontend.answers.schema import (
    SYSTEM_FINGERPRINT,
    CalledFunction,
    CascadeFacts,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionTokensDetails,
    FinishReason,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from services.frontend.answers.sse import ChunkEnvelope, encode, event
from services.frontend.parsers.deltas import CallDelta, MessageDelta
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.schema import ChatCompletionRequest, GenerationRequest
from services.frontend.text.model_text import ModelText


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
class AnswerExtras:
    """What an answer holds besides its text."""

    echoes: Sequence[str]
    """By choice: what its text begins with."""
    prompts: Sequence[Sequence[int]] = ()
    """By choice: the prompt's token ids, where something has to be said of them."""
    token_ids: bool = False
    """Those of prompt and answer are told."""
    spells_ids: bool = False
    """Logprobs spell tokens by their ids."""
    counts: bool = False
    """Every chunk says how many tokens its choice has."""
    prompt_text: str | None = None
    """What the chat template made of the conversation, where it is told."""
    is_chat: bool = True
    """Not a completion."""
    role: str = "assistant"
    """Whose message a chat's answer is."""
    block_tokens: int = 0
    """Of the prefix cache; 0: not known."""
    is_batch: bool = False
    """A chat's choices are of several conversations, so there is no one prompt to tell of."""
    tells_reasoning: bool = False
    """The usage says how many tokens are reasoning."""
    media_tokens: Mapping[str, int] = field(default_factory=dict)
    """By modality: tokens of a chat's prompt that stand for images and the like."""
    is_echo: bool = False
    """A completion begins with its prompt, in its logprobs at least: the text may be nothing but special tokens."""

    @classmethod
    def of(cls, request: GenerationRequest, plan: GenerationPlan) -> "AnswerExtras":
        """Those that `request` asks for, which `plan` was made from."""
        prompts = [plan.prompts[choice // plan.n] for choice in range(len(plan.prompts) * plan.n)]
        options = request.stream_options
        return cls(
            [prompt.echo for prompt in prompts],
            [prompt.token_ids for prompt in prompts],
            bool(request.return_token_ids),
            bool(request.return_tokens_as_token_ids),
            options is not None and bool(options.include_usage) and bool(options.continuous_usage_stats),
            plan.prompts[0].text,
            isinstance(request, ChatCompletionRequest),
            _role(request),
            plan.model.block_tokens,
            isinstance(request, ChatCompletionRequest) and len(plan.prompts) > 1,
            tells_reasoning_tokens(request, plan),
            plan.prompts[0].media_tokens,
            not isinstance(request, ChatCompletionRequest) and bool(request.echo),
        )

    def is_echoed(self, index: int) -> bool:
        """Whether the logprobs of a choice begin with those of its prompt."""
        return self.is_echo or bool(self.echoes[index])

    def usage_of(self, index: int, tokens: int, reasoning_tokens: int = 0) -> Usage | msgspec.UnsetType:
        """Of a choice that has so many tokens, if every chunk says so."""
        if not self.counts:
            return msgspec.UNSET
        prompt_tokens = len(self.prompts[index])
        usage = Usage(prompt_tokens, tokens, prompt_tokens + tokens)
        if self.is_chat:
            usage.completion_tokens_details = (
                CompletionTokensDetails(reasoning_tokens) if self.tells_reasoning else None
            )
        return usage

    def ids_of(self, token_ids: Sequence[int]) -> list[int] | None:
        """As an answer holds them, if it does."""
        return list(token_ids) if self.token_ids else None

    def with_details(self, usage: Usage) -> Usage:
        """The usage of a chat with the tokens of its prompt that later ones find in the prefix cache, and those of its
        images and the like."""
        details = usage.prompt_tokens_details
        if isinstance(details, msgspec.UnsetType) or not self.prompts:
            return usage
        found: dict[str, Any] = {"multimodal_tokens": dict(self.media_tokens)} if self.media_tokens else {}
        if self.block_tokens:
            in_blocks = len(self.prompts[0]) // self.block_tokens * self.block_tokens
            found["created_cache_tokens"] = max(0, in_blocks - details.cached_tokens)
        return msgspec.structs.replace(usage, prompt_tokens_details=msgspec.structs.replace(details, **found))


def _role(request: GenerationRequest) -> str:
    """vLLM's reading: what goes on with a message is of its role."""
    if isinstance(request, ChatCompletionRequest) and request.add_generation_prompt is False:
        return str(request.messages[-1]["role"])
    return "assistant"


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """A choice that has ended, for an answer that is not streamed."""

    index: int
    text: str
    positions: Sequence[TokenPosition]
    finish: Finish
    token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[request_pb2.PositionLogprobs] = ()
    message: MessageDelta | None = None
    """What the parser process has made of it."""
    stop_reason: int | str | None = None
    """The stop token or the stop string that ended it."""
    reasoning_tokens: int | None = None
    """None where the parser process has counted them, or nobody."""

    @classmethod
    def of(cls, pieces: Sequence[ChoicePiece]) -> "WholeChoice":
        """All pieces of a choice as one."""
        last = pieces[-1]
        assert last.finish is not None, "a choice ends with its last piece"
        return cls(
            last.index,
            "".join(piece.text for piece in pieces),
            [position for piece in pieces for position in piece.positions],
            last.finish,
            [token_id for piece in pieces for token_id in piece.token_ids],
            next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs), ()),
            last.message,
            last.stop_reason,
            last.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """The only choice of an answer that is known as a whole before any of it is sent."""

    text: str
    positions: Sequence[TokenPosition]
    finish: Finish
    usage: Usage
    stop_reason: int | str | None = None


class StreamFormat(Protocol):
    """Encodes the events of one streamed answer: call the methods in the order in which they stand here."""

    def first_events(self) -> bytes:
        """What a stream begins with, before any token; may be empty."""

    def event(self, piece: ChoicePiece) -> bytes:
        """The chunk that brings a piece; empty if it shows nothing yet."""

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk, where the client asked for it."""


class AnswerFormat(StreamFormat, Protocol):
    """Encodes the answer to one request, streamed or whole."""

    def covered(self, piece: ChoicePiece) -> None:
        """The client of a resumed stream has this piece: the next one is read behind it."""

    def go_on(self, before: "AnswerFormat") -> None:
        """Read on behind what another format of the same answer has read or will read. Call it before any event."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


def answer_format(request: GenerationRequest, header: AnswerHeader, plan: GenerationPlan) -> AnswerFormat:
    """For the answers to `request`, which `plan` was made from."""
    extras = AnswerExtras.of(request, plan)
    if not isinstance(request, ChatCompletionRequest):
        return CompletionFormat(header, extras)
    return ChatFormat(header, extras, message_reading(request, plan))


_NOTHING: Final = ChatDelta()


class ChatFormat:
    """The `AnswerFormat` of /v1/chat/completions."""

    def __init__(self, header: AnswerHeader, extras: AnswerExtras, reading: MessageReading | None = None) -> None:
        """`reading`: how text becomes a message; None: it is the content."""
        self._header = header
        self._extras = extras
        self._messages = None if reading is None else [MessageText(reading) for _ in extras.echoes]
        self._reasoning_tokens = [0] * len(extras.echoes)
        """Of each choice, as far as it is read."""
        self._chunk = ChatCompletionChunk(
            header.request_id, header.created_unix_s, header.model, [], penstock=header.cascade
        )
        plain = partial(ChatChunkChoice, delta=ChatDelta(content=""), logprobs=None, finish_reason=None)
        self._envelope = ChunkEnvelope(self._chunk, len(extras.echoes), plain)
        self._is_plain = not (header.logprobs or extras.token_ids or extras.counts)

    def first_events(self) -> bytes:
        """One chunk for each choice that says its role, as OpenAI sends before any text, and brings what is echoed."""
        extras = self._extras
        first = msgspec.structs.replace(
            self._chunk, prompt_token_ids=extras.ids_of(_first(extras.prompts)), prompt_text=extras.prompt_text
        )
        events = []
        for index, echo in enumerate(extras.echoes):
            delta = ChatDelta(role=extras.role, content=echo)
            first.choices = [ChatChunkChoice(index, delta, None, None, token_ids=msgspec.UNSET)]
            first.usage = extras.usage_of(index, 0)
            events.append(event(encode(first)))
        return b"".join(events)

    def event(self, piece: ChoicePiece) -> bytes:
        """The chunk for one piece; one that brings nothing but text is put together from encoded parts."""
        if piece.finish is None and self._is_plain and self._messages is None:
            return self._envelope.text_event(piece.index, piece.text)
        delta, finish, extras = self._delta(piece), self._finish(piece), self._extras
        if delta == _NOTHING and finish is None:
            if self._is_plain:
                return b""
            if piece.message is not None:  # as vLLM's parsers say of a token that is no text
                delta = ChatDelta(content="")
        logprobs = self._logprobs(piece.positions)
        choice = ChatChunkChoice(piece.index, delta, logprobs, finish, token_ids=extras.ids_of(piece.token_ids))
        if finish is None and not extras.counts:
            return self._envelope.choice_event(choice)
        if finish is not None:
            choice.stop_reason = piece.stop_reason
        usage = extras.usage_of(piece.index, piece.tokens, self._reasoning_tokens[piece.index])
        chunk = msgspec.structs.replace(self._chunk, choices=[choice], usage=usage)
        if finish is not None and not self._header.include_usage:
            chunk.system_fingerprint = SYSTEM_FINGERPRINT
        return event(encode(chunk))

    def covered(self, piece: ChoicePiece) -> None:
        if self._messages is not None:
            self._read(self._messages[piece.index], piece)

    def go_on(self, before: AnswerFormat) -> None:
        assert isinstance(before, ChatFormat), "an answer keeps its form"
        self._messages, self._reasoning_tokens = before._messages, before._reasoning_tokens

    def _delta(self, piece: ChoicePiece) -> ChatDelta:
        if self._messages is None:
            return ChatDelta(content=piece.text or None)
        read = self._read(self._messages[piece.index], piece)
        calls = [self._call_delta(piece.index, call) for call in read.calls]
        return ChatDelta(content=read.content or None, reasoning=read.reasoning or None, tool_calls=calls or None)

    def _read(self, message: MessageText, part: ChoicePiece | WholeChoice) -> MessageDelta:
        read = message.read(part.text, part.finish, part.message)
        counted = read.reasoning_tokens if part.reasoning_tokens is None else part.reasoning_tokens
        if counted is not None:
            self._reasoning_tokens[part.index] = counted
        return read

    def _with_reasoning(self, usage: Usage) -> Usage:
        if not self._extras.tells_reasoning or self._header.cascade is not msgspec.UNSET:
            return usage
        details = CompletionTokensDetails(sum(self._reasoning_tokens))
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def _finish(self, part: ChoicePiece | WholeChoice) -> FinishReason | None:
        """To be asked once the part was read."""
        ended_by_calls = self._messages is not None and self._messages[part.index].ended_by_calls
        return "tool_calls" if part.finish == "stop" and ended_by_calls else part.finish

    def _call_delta(self, index: int, call: CallDelta) -> ToolCallDelta:
        function = FunctionDelta(call.name, call.arguments)
        if call.name is None:
            return ToolCallDelta(call.index, function)
        return ToolCallDelta(call.index, function, call_id(self._header.request_id, index, call), "function")

    def usage_event(self, usage: Usage) -> bytes:
        """The chunk without choices that `stream_options.include_usage` asks for."""
        return _usage_event(self._chunk, self._with_reasoning(self._extras.with_details(usage)))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The `chat.completion` object."""
        header, extras = self._header, self._extras
        listed = [self._whole_choice(choice) for choice in choices]
        return encode(
            ChatCompletion(
                header.request_id,
                header.created_unix_s,
                header.model,
                listed,
                self._with_reasoning(extras.with_details(usage)).whole(),
                prompt_logprobs=None if extras.is_batch else prompt_logprobs(choices[0].prompt_logprobs, header.text),
                prompt_token_ids=None if extras.is_batch else extras.ids_of(_first(extras.prompts)),
                prompt_text=extras.prompt_text,
                penstock=header.cascade,
            )
        )

    def _whole_choice(self, choice: WholeChoice) -> ChatChoice:
        message = self._whole_message(choice)
        finish = self._finish(choice) or choice.finish
        token_ids = self._extras.ids_of(choice.token_ids)
        logprobs = self._logprobs(choice.positions)
        return ChatChoice(choice.index, message, logprobs, finish, choice.stop_reason, token_ids)

    def _whole_message(self, choice: WholeChoice) -> ChatMessage:
        echo = self._extras.echoes[choice.index]
        if self._messages is None:
            return ChatMessage(echo + choice.text, self._extras.role)
        read = self._read(self._messages[choice.index], choice)
        message = ChatMessage((echo + read.content) or None, self._extras.role)
        if read.reasoning:
            message.reasoning = read.reasoning
        if read.calls:  # of one piece of text, so that each call is one delta
            message.tool_calls = [
                ToolCall(
                    call_id(self._header.request_id, choice.index, call),
                    CalledFunction(call.name or "", call.arguments),
                )
                for call in read.calls
            ]
        return message

    def _logprobs(self, positions: Sequence[TokenPosition]) -> ChatLogprobs | None:
        if not self._header.logprobs:
            return None
        spell = Speller(self._header.text, by_id=self._extras.spells_ids)
        return ChatLogprobs([chat_entry(position.logprobs, spell) for position in positions])


class CompletionFormat:
    """The `AnswerFormat` of /v1/completions."""

    def __init__(self, header: AnswerHeader, extras: AnswerExtras) -> None:
        self._header = header
        self._extras = extras
        self._spell = Speller(header.text, by_id=extras.spells_ids)
        self._chunk = Completion(header.request_id, header.created_unix_s, header.model, [], penstock=header.cascade)
        plain = partial(CompletionChoice, text="", logprobs=None, finish_reason=None)
        self._envelope = ChunkEnvelope(self._chunk, len(extras.echoes), plain)
        self._is_plain = not (header.logprobs or extras.token_ids or extras.counts)
        self._begun: set[int] = set()
        """Choices whose first piece was sent: with logprobs it is what brings the echo."""
        self._named = [0] * len(extras.echoes)
        """Characters in the names of the tokens whose logprobs were told, by choice."""

    def first_events(self) -> bytes:
        """The prompts that the client asked to have echoed or told, one chunk for each choice; often empty."""
        extras, events = self._extras, []
        for index, echo in enumerate(extras.echoes):
            if extras.is_echoed(index) and self._header.logprobs:
                continue  # the first piece has all of it
            if extras.token_ids or echo:
                choice = CompletionChoice(index, echo, None, None, prompt_token_ids=list(extras.prompts[index]))
                choice.token_ids = extras.ids_of(())
                events.append(self._envelope.choice_event(choice))
        return b"".join(events)

    def event(self, piece: ChoicePiece) -> bytes:
        """The chunk for one piece; one that brings nothing but text is put together from encoded parts."""
        if piece.finish is None and self._is_plain:
            return self._envelope.text_event(piece.index, piece.text)
        begins = self._header.logprobs and piece.index not in self._begun and self._extras.is_echoed(piece.index)
        self._begun.add(piece.index)
        choice = self._choice(piece, self._extras.echoes[piece.index] if begins else "", is_echoed=begins)
        if begins:
            choice.prompt_token_ids = list(self._extras.prompts[piece.index])
        is_last = piece.finish is not None and not self._header.include_usage
        if not is_last and not self._extras.counts:
            return self._envelope.choice_event(choice)
        usage = self._extras.usage_of(piece.index, piece.tokens)
        chunk = msgspec.structs.replace(self._chunk, choices=[choice], usage=usage)
        if is_last:
            chunk.system_fingerprint = SYSTEM_FINGERPRINT
        return event(encode(chunk))

    def covered(self, piece: ChoicePiece) -> None:
        """See `AnswerFormat`. Text needs nothing of what stands before it."""

    def go_on(self, before: AnswerFormat) -> None:
        """See `covered`."""

    def usage_event(self, usage: Usage) -> bytes:
        """The chunk without choices that `stream_options.include_usage` asks for."""
        return _usage_event(self._chunk, usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The `text_completion` object, each echoed prompt in front of its text."""
        extras, listed = self._extras, []
        for choice in choices:
            told = self._choice(choice, extras.echoes[choice.index], is_echoed=extras.is_echoed(choice.index))
            told.prompt_token_ids = extras.ids_of(extras.prompts[choice.index] if extras.prompts else ())
            told.prompt_logprobs = prompt_logprobs(choice.prompt_logprobs, self._header.text)
            told.routed_experts = None
            listed.append(told)
        return encode(
            msgspec.structs.replace(
                self._chunk,
                choices=listed,
                service_tier=None,
                system_fingerprint=SYSTEM_FINGERPRINT,
                usage=usage.whole(),
                kv_transfer_params=None,
                ec_transfer_params=None,
                metrics=None,
            )
        )

    def _choice(self, part: ChoicePiece | WholeChoice, echo: str, *, is_echoed: bool) -> CompletionChoice:
        logprobs, extras = None, self._extras
        if self._header.logprobs:
            of_prompt = None
            if is_echoed:
                of_prompt = echoed_logprobs(extras.prompts[part.index], part.prompt_logprobs, self._spell)
                self._named[part.index] = sum(map(len, of_prompt.tokens))
            logprobs = completion_logprobs(part.positions, self._spell, self._named[part.index])
            self._named[part.index] += sum(map(len, logprobs.tokens))
            if of_prompt is not None:
                logprobs = joined(of_prompt, logprobs)
        token_ids = extras.ids_of(part.token_ids)
        return CompletionChoice(part.index, echo + part.text, logprobs, part.finish, part.stop_reason, None, token_ids)


def _first(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    return prompts[0] if prompts else ()


def _usage_event(chunk: ChatCompletionChunk | Completion, usage: Usage) -> bytes:
    told = msgspec.structs.replace(chunk, usage=usage.in_stream(), system_fingerprint=SYSTEM_FINGERPRINT)
    return event(encode(told))
