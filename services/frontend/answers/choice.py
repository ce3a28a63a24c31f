"""The text side of one choice: tokens in, text out that is decided, and the logprobs that belong to it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from penstock.v1 import request_pb2
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.stop_strings import StopStrings
from services.frontend.workers.token_mailbox import Piece

Finish = Literal["stop", "length"]

_FINISHES: Final[dict[int, Finish]] = {
    request_pb2.FINISH_REASON_STOP: "stop",
    request_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class TokenPosition:
    """A token of the answer with its logprobs."""

    text_offset: int
    """Where its text begins in the answer."""
    logprobs: request_pb2.PositionLogprobs


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """What can be shown to the client now."""

    index: int
    text: str
    positions: Sequence[TokenPosition]
    finish: Finish | None
    tokens: int = 0
    """Of the choice, up to here."""


class ChoiceText:
    """Detokenises, holds back what may become a stop string, and ends the choice at one."""

    __slots__ = (
        "_detokenizer",
        "_ending_token_ids",
        "_held",
        "_index",
        "_read",
        "_read_ids",
        "_shown",
        "_stops",
        "finish",
        "tokens",
    )

    def __init__(
        self, index: int, detokenizer: Detokenizer, stop: Sequence[str], ending_token_ids: frozenset[int]
    ) -> None:
        """`ending_token_ids`: the end-of-sequence tokens and the request's stop tokens; one that ended the
        choice is not shown."""
        self._index = index
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop)
        self._ending_token_ids = ending_token_ids
        self._read = 0
        self._read_ids = 0
        """Tokens of the piece at hand that were read."""
        self._shown = 0
        self._held: deque[TokenPosition] = deque()
        self.tokens = 0
        """Tokens received, for the usage."""
        self.finish: Finish | None = None

    def push(self, piece: Piece) -> ChoicePiece | None:
        """What the piece lets be shown; None if nothing, as also after the end."""
        if self.finish is not None:
            return None
        token_ids = piece.token_ids
        self.tokens += len(token_ids)
        finish = _FINISHES[piece.finish_reason] if piece.finish_reason else None
        if finish == "stop" and token_ids and token_ids[-1] in self._ending_token_ids:
            token_ids = token_ids[:-1]
        text = self._with_logprobs(token_ids, piece) if piece.logprobs else self._read_tokens(token_ids)
        if self._stops.stopped:  # what came with the stop string, and behind it, is no part of the answer
            self.tokens += self._read_ids - len(piece.token_ids)
        if finish is not None and not self._stops.stopped:
            text += self._stops.push(self._count(self._detokenizer.finish()))
            text += self._stops.finish()
        if self._stops.stopped:
            finish = "stop"
        self.finish = finish
        self._shown += len(text)
        positions = self._decided_positions()
        if not text and not positions and finish is None:
            return None
        return ChoicePiece(self._index, text, positions, finish, self.tokens)

    @property
    def cut_by_stop_string(self) -> bool:
        """The engine goes on generating and has to be told."""
        return self._stops.stopped

    def _read_tokens(self, token_ids: Sequence[int]) -> str:
        if not self._stops.watches:
            return self._count(self._detokenizer.push(token_ids))
        text, self._read_ids = "", 0
        for token_id in token_ids:
            text += self._read_watched(token_id)
            if self._stops.stopped:
                break
        return text

    def _with_logprobs(self, token_ids: Sequence[int], piece: Piece) -> str:
        text, self._read_ids = "", 0
        for token_id, logprobs in zip(token_ids, piece.logprobs, strict=False):
            self._held.append(TokenPosition(self._read, logprobs))
            text += self._read_watched(token_id)
            if self._stops.stopped:
                break
        return text

    def _read_watched(self, token_id: int) -> str:
        self._read_ids += 1
        return self._stops.push(self._count(self._detokenizer.push((token_id,))))

    def _count(self, text: str) -> str:
        self._read += len(text)
        return text

    def _decided_positions(self) -> list[TokenPosition]:
        """Logprobs spell out tokens, so they are held back as long as the text of their tokens is."""
        decided: list[TokenPosition] = []
        while self._held and self._is_decided():
            decided.append(self._held.popleft())
        return decided

    def _is_decided(self) -> bool:
        """Whether the first position that is held back can be shown."""
        begins = self._held[0].text_offset < self._shown
        if self.finish is not None:
            return begins or not self._stops.stopped
        end = self._held[1].text_offset if len(self._held) > 1 else self._read
        return begins and end <= self._shown
