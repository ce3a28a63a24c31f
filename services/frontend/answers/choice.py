"""The text side of one choice: tokens in, text out that is decided, and the logprobs that belong to it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from penstock.v1 import request_pb2
from services.frontend.answers.message_text import reasoning_tokens, tokens_shown
from services.frontend.parsers.deltas import MessageDelta
from services.frontend.parsers.reasoning import ReasoningTokens
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.schema import GenerationRequest
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
class TextRules:
    """What of a choice's tokens is shown, and where it ends."""

    stop: Sequence[str] = ()
    """Strings that end it."""
    ending_token_ids: frozenset[int] = frozenset()
    """The end-of-sequence tokens and the request's stop tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """The request's stop tokens without the end-of-sequence tokens."""
    shows_stop: bool = False
    """The string or the token that ended the choice is part of its text."""
    min_tokens: int = 0
    """Stop strings among so many tokens do not end it."""
    keeps_token_ids: bool = False
    """The client wants them, too."""
    tells_tokens: bool = False
    """The parser process reads the answer, token by token."""
    tells_end: bool = False
    """The token that ended the choice has its place among the logprobs, although it is not shown."""
    is_empty: bool = False
    """Only the prompt was to be computed: what is generated is nothing of the client's."""


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """What can be shown to the client now."""

    index: int
    text: str
    positions: Sequence[TokenPosition]
    finish: Finish | None
    tokens: int = 0
    """Of the choice, up to here."""
    token_ids: Sequence[int] = ()
    """What `text` was made of, and what of it is held back; only where the client wants them."""
    prompt_logprobs: Sequence[request_pb2.PositionLogprobs] = ()
    """With the first piece, where they were asked for."""
    parts: Sequence[tuple[str, Sequence[int]]] = ()
    """`text` by token, where the parser process reads it; at the end one without a token is possible."""
    message: MessageDelta | None = None
    """What the parser process has made of it."""
    stop_reason: int | str | None = None
    """The stop token or the stop string that ended the choice."""
    reasoning_tokens: int | None = None
    """Of the choice, up to here; None where it is not counted here."""


class ChoiceText:
    """Detokenises, holds back what may become a stop string, and ends the choice at one."""

    __slots__ = (
        "_detokenizer",
        "_held",
        "_index",
        "_parts",
        "_prompt_logprobs",
        "_read",
        "_read_ids",
        "_reasoning",
        "_rules",
        "_seen",
        "_shown",
        "_stops",
        "_token_ids",
        "finish",
        "tokens",
    )

    def __init__(
        self, index: int, detokenizer: Detokenizer, rules: TextRules, reasoning: ReasoningTokens | None = None
    ) -> None:
        """`reasoning` counts them; None: they are not counted here."""
        self._index = index
        self._reasoning = reasoning
        self._detokenizer = detokenizer
        self._rules = rules
        self._stops = StopStrings(rules.stop, is_shown=rules.shows_stop)
        self._token_ids: list[int] = []
        """Those of no piece yet, if the client wants them."""
        self._parts: list[tuple[str, Sequence[int]]] = []
        self._prompt_logprobs: Sequence[request_pb2.PositionLogprobs] = ()
        self._seen = 0
        """Tokens read while stop strings are looked for."""
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
        self._prompt_logprobs = self._prompt_logprobs or piece.prompt_logprobs
        if self._rules.is_empty:
            return self._end_empty() if piece.finish_reason else None
        token_ids, rules = piece.token_ids, self._rules
        self.tokens += len(token_ids)
        finish = _FINISHES[piece.finish_reason] if piece.finish_reason else None
        stop_reason: int | str | None = None
        if finish == "stop" and token_ids and token_ids[-1] in rules.stop_token_ids:
            stop_reason = token_ids[-1]
        if finish == "stop" and token_ids and token_ids[-1] in rules.ending_token_ids and not rules.shows_stop:
            token_ids = token_ids[:-1]
        text = self._with_logprobs(token_ids, piece) if piece.logprobs else self._read_tokens(token_ids)
        if rules.tells_end and not self._stops.stopped and len(token_ids) < len(piece.logprobs):
            self._held.append(TokenPosition(self._read, piece.logprobs[len(token_ids)]))
        if rules.tells_tokens and len(token_ids) < len(piece.token_ids) and not self._stops.stopped:
            self._parts.append(("", piece.token_ids[-1:]))
        said = piece.token_ids
        if self._stops.stopped:  # what came with the stop string, and behind it, is no part of the answer
            self.tokens += self._read_ids - len(piece.token_ids)
            said = said[: self._read_ids]
        if rules.keeps_token_ids:
            self._token_ids += said
        if self._reasoning is not None:
            self._reasoning.push(token_ids[: self._read_ids] if self._stops.stopped else token_ids)
        if finish is not None and not self._stops.stopped:
            held = self._stops.push(self._count(self._detokenizer.finish())) + self._stops.finish()
            text += held
            if held and rules.tells_tokens:
                before, ids = self._parts.pop() if self._parts else ("", ())
                self._parts.append((before + held, ids))
        if self._stops.stopped:
            finish, stop_reason = "stop", self._stops.found
        self.finish = finish
        self._shown += len(text)
        positions = self._decided_positions()
        if not text and not positions and finish is None and not self._parts:
            return None
        token_ids, self._token_ids = self._token_ids, []
        parts, self._parts = self._parts, []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        return ChoicePiece(
            self._index,
            text,
            positions,
            finish,
            self.tokens,
            token_ids,
            prompt_logprobs,
            parts,
            None,
            stop_reason,
            None if self._reasoning is None else self._reasoning.count,
        )

    def forget(self) -> None:
        """The client has the token ids up to here, from a stream that it resumes."""
        self._token_ids = []

    def _end_empty(self) -> ChoicePiece:
        self.finish = "length"
        return ChoicePiece(self._index, "", (), self.finish, 0, (), self._prompt_logprobs)

    @property
    def cut_by_stop_string(self) -> bool:
        """The engine goes on generating and has to be told."""
        return self._stops.stopped

    def _read_tokens(self, token_ids: Sequence[int]) -> str:
        if not (self._stops.watches or self._rules.tells_tokens):
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
        self._seen += 1
        may_stop = self._seen > self._rules.min_tokens
        text = self._stops.push(self._count(self._detokenizer.push((token_id,))), may_stop=may_stop)
        if self._rules.tells_tokens:
            self._parts.append((text, (token_id,)))
        return text

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
        if self.finish is not None:
            return True
        begins = self._held[0].text_offset < self._shown
        end = self._held[1].text_offset if len(self._held) > 1 else self._read
        return begins and end <= self._shown


def choice_text(request: GenerationRequest, plan: GenerationPlan, index: int) -> ChoiceText:
    """For a choice of the answer to `request`, which `plan` was made from."""
    prompt, text = plan.prompts[index // plan.n], plan.model.text
    rules = TextRules(
        plan.stop,
        plan.ending_token_ids,
        frozenset(prompt.sampling.stop_token_ids) - text.eos_token_ids,
        shows_stop=bool(request.include_stop_str_in_output),
        min_tokens=prompt.sampling.min_tokens,
        keeps_token_ids=bool(request.return_token_ids),
        tells_tokens=plan.read_by is not None,
        tells_end=request.logprobs is not None and request.logprobs is not False,
        is_empty=request.max_tokens == 0,
    )
    shows_all = plan.read_by is not None and plan.read_by.shows_special_tokens
    skips = request.skip_special_tokens is not False and not shows_all
    shown = tokens_shown(request, plan.model)
    detokenizer = text.detokenizer(prompt.token_ids, skip_special_tokens=skips, shown=shown)
    return ChoiceText(index, detokenizer, rules, reasoning_tokens(request, plan, index))
