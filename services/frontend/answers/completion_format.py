"""text_completion, whole and in chunks"""

from collections.abc import Sequence

import msgspec

from services.frontend.answers.choice import ChoicePiece, Finish, TokenPosition
from services.frontend.answers.formats import AnswerHeader, WholeChoice
from services.frontend.answers.logprobs import completion_logprobs
from services.frontend.answers.schema import Completion, CompletionChoice, Usage
from services.frontend.answers.sse import ChunkEnvelope, encode, event


class CompletionFormat:
    """See `AnswerFormat`."""

    def __init__(self, header: AnswerHeader, echoes: Sequence[str]) -> None:
        """`echoes`: what the text of each choice begins with."""
        self._header = header
        self._echoes = echoes
        self._chunk = Completion(header.request_id, header.created_unix_s, header.model, [], penstock=header.cascade)
        if header.include_usage:
            self._chunk.usage = None
        self._envelope = ChunkEnvelope(self._chunk, len(echoes), b'"text":', b",")

    def first_events(self) -> bytes:
        """The echoed prompts."""
        echoed = ((index, echo) for index, echo in enumerate(self._echoes) if echo)
        return b"".join([self._envelope.text_event(index, echo) for index, echo in echoed])

    def event(self, piece: ChoicePiece) -> bytes:
        """Text, logprobs and finish reason of a choice."""
        if piece.finish is None and not self._header.logprobs:
            return self._envelope.text_event(piece.index, piece.text)
        return self._envelope.choice_event(self._choice(piece.index, piece.text, piece.positions, piece.finish))

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk."""
        return event(encode(msgspec.structs.replace(self._chunk, usage=usage)))

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """A text_completion."""
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
