"""chat.completion and chat.completion.chunk"""

from collections.abc import Sequence

import msgspec

from services.frontend.answers.choice import ChoicePiece, TokenPosition
from services.frontend.answers.formats import AnswerHeader, WholeChoice
from services.frontend.answers.logprobs import chat_logprobs
from services.frontend.answers.schema import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from services.frontend.answers.sse import ChunkEnvelope, encode, event


class ChatFormat:
    """See `AnswerFormat`."""

    def __init__(self, header: AnswerHeader, choices: int) -> None:
        self._header = header
        self._choices = choices
        self._chunk = ChatCompletionChunk(
            header.request_id, header.created_unix_s, header.model, [], penstock=header.cascade
        )
        if header.include_usage:
            self._chunk.usage = None
        self._envelope = ChunkEnvelope(self._chunk, choices, b'"delta":{"content":', b"},")

    def first_events(self) -> bytes:
        """Each choice's role."""
        delta = ChatDelta(role="assistant", content="")
        roles = (ChatChunkChoice(index, delta, None, None) for index in range(self._choices))
        return b"".join([self._envelope.choice_event(role) for role in roles])

    def event(self, piece: ChoicePiece) -> bytes:
        """Text, logprobs and finish reason of a choice."""
        if piece.finish is None and not self._header.logprobs:
            return self._envelope.text_event(piece.index, piece.text)
        delta = ChatDelta(content=piece.text or None)
        choice = ChatChunkChoice(piece.index, delta, self._logprobs(piece.positions), piece.finish)
        return self._envelope.choice_event(choice)

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk."""
        return event(encode(msgspec.structs.replace(self._chunk, usage=usage)))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """A chat.completion."""
        header = self._header
        listed = [
            ChatChoice(choice.index, ChatMessage(choice.text), self._logprobs(choice.positions), choice.finish)
            for choice in choices
        ]
        return encode(
            ChatCompletion(
                header.request_id, header.created_unix_s, header.model, listed, usage, penstock=header.cascade
            )
        )

    def _logprobs(self, positions: Sequence[TokenPosition]) -> ChatLogprobs | None:
        return chat_logprobs(positions, self._header.text) if self._header.logprobs else None
