"""All choices of one generation as the client is to see them, step by step."""

from collections.abc import Callable, Sequence

from prometheus_client import Histogram

from services.frontend.answers.choice import ChoicePiece, ChoiceText
from services.frontend.api.answer_schema import PromptTokensDetails, Usage
from services.frontend.generation import Generation
from services.frontend.mailbox import Piece


class AnswerReader:
    """Turns a mailbox's pieces into text, tells the engine of stop strings, and measures."""

    def __init__(
        self,
        generation: Generation,
        texts: Sequence[ChoiceText],
        ttft: Histogram,
        inter_token: Histogram,
        clock: Callable[[], float],
    ) -> None:
        """`ttft` gets the time from the generation's start, `inter_token` that between two chunks of a choice."""
        self._generation = generation
        self._texts = texts
        self._unfinished = len(texts)
        self._clock = clock
        self._last_s: list[float | None] = [None] * len(texts)
        self._cached_tokens: dict[int, int] = {}
        self._ttft = ttft
        self._inter_token = inter_token

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return self._unfinished == 0

    async def next(self) -> list[ChoicePiece]:
        """What has become visible; may be empty. Raises ApiError if the generation failed."""
        pieces = await self._generation.mailbox.take()
        now_s = self._clock()
        shown: list[ChoicePiece] = []
        for piece in pieces:
            self._measure(piece, now_s)
            visible = self._texts[piece.index].push(piece)
            if visible is None:
                continue
            shown.append(visible)
            if visible.finish is not None:
                self._unfinished -= 1
                self._generation.abort_choice(piece.index)
        return shown

    def usage(self) -> Usage:
        """So far."""
        plan = self._generation.plan
        completion_tokens = sum(text.tokens for text in self._texts)
        # The choices of a prompt share its blocks: only the first one says what was there before this request.
        cached_tokens = sum(self._cached_tokens.get(index, 0) for index in range(0, len(self._texts), plan.n))
        return Usage(
            plan.prompt_tokens,
            completion_tokens,
            plan.prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens),
        )

    def _measure(self, piece: Piece, now_s: float) -> None:
        last_s = self._last_s[piece.index]
        self._last_s[piece.index] = now_s
        if last_s is not None:
            self._inter_token.observe(now_s - last_s)
            return
        self._ttft.observe(now_s - self._generation.started_s)
        if piece.cached_tokens is not None:
            self._cached_tokens[piece.index] = piece.cached_tokens
