"""All choices of one generation as the client is to see them, step by step."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from prometheus_client import Histogram

from services.frontend.answers.choice import ChoicePiece, ChoiceText
from services.frontend.answers.event_ids import Covered
from services.frontend.answers.schema import PromptTokensDetails, Usage
from services.frontend.errors import upstream_failed
from services.frontend.requests.generation import Generation
from services.frontend.workers.token_mailbox import Piece


class AnswerReader:
    """Turns a mailbox's pieces into text, tells the engine of stop strings, and measures."""

    def __init__(
        self,
        generation: Generation,
        texts: Sequence[ChoiceText],
        ttft: Histogram,
        inter_token: Histogram,
        clock: Callable[[], float],
        covered: Covered | None = None,
        on_covered: Callable[[ChoicePiece], None] = lambda _: None,
        *,
        is_resumed: bool = False,
        token_by_token: bool = False,
    ) -> None:
        """`ttft` gets the time from the generation's start, `inter_token` that between two chunks of a choice.
        `covered`: what the client has already of a stream that it resumes; all tokens come nevertheless, because text
        is made from the first one on. `on_covered` is called with what the client has of it. `token_by_token`: what
        becomes visible is cut by tokens alone, however many came at once."""
        self._generation = generation
        self._texts = texts
        self._unfinished = len(texts)
        self._clock = clock
        self._is_resumed = is_resumed
        self._token_by_token = token_by_token
        self._covered = covered
        self._on_covered = on_covered
        self.first_s: float | None = None
        """When the first token came, on `clock`."""
        self._firsts_s: list[float | None] = [None] * len(texts)
        """Of each choice."""
        self._last_s: list[float | None] = [None] * len(texts)
        self._cached_tokens: dict[int, int] = {}
        self._has_prompt_logprobs: set[int] = set()
        self._ttft = ttft
        self._inter_token = inter_token

    @property
    def done(self) -> bool:
        """Whether all choices have ended: nothing is left to wait for."""
        return self._unfinished == 0

    @property
    def finishes(self) -> tuple[str | None, ...]:
        """Why each choice ended; None: it has not."""
        return tuple(text.finish for text in self._texts)

    @property
    def choice_tokens(self) -> tuple[int, ...]:
        """Of each choice up to now."""
        return tuple(text.tokens for text in self._texts)

    def mean_token_s(self) -> Iterator[float]:
        """The mean time of the tokens after the first, of each choice that has ended and has several. A stream that is
        resumed has none: its tokens up to there come all at once."""
        if self._is_resumed:
            return
        for text, first_s, last_s in zip(self._texts, self._firsts_s, self._last_s, strict=True):
            if text.finish is not None and text.tokens > 1 and first_s is not None and last_s is not None:
                yield (last_s - first_s) / (text.tokens - 1)

    def wait(self) -> Awaitable[None]:
        """Done once there is something to `read`."""
        return self._generation.mailbox.wait()

    def read(self) -> list[ChoicePiece]:
        """What has become visible; may be empty. Raises ApiError if the generation failed."""
        pieces: Iterable[Piece] = self._generation.mailbox.take()
        if self._token_by_token:
            pieces = [single for piece in pieces for single in _by_token(piece)]
        now_s = self._clock()
        shown: list[ChoicePiece] = []
        for piece in pieces:
            self._measure(piece, now_s)
            if piece.prompt_logprobs:
                self._has_prompt_logprobs.add(piece.index)
            for part, is_new in self._parts(piece):
                visible = self._texts[piece.index].push(part)
                if not is_new:
                    self._texts[piece.index].forget()
                if visible is None:
                    continue
                if is_new:
                    shown.append(visible)
                else:
                    self._on_covered(visible)
                if visible.finish is not None:
                    self._check_prompt_logprobs(piece.index)
                    self._unfinished -= 1
                    self._generation.abort_choice(piece.index)
        return shown

    def _check_prompt_logprobs(self, index: int) -> None:
        """They come with the first tokens; where the rest of those was learnt from the next owner of the request, they
        are lost. Raises ApiError rather than leave them out."""
        plan = self._generation.plan
        prompt = plan.prompts[index // plan.n]
        is_wanted = prompt.sampling.HasField("prompt_logprobs") and len(prompt.token_ids) > 1
        if is_wanted and index not in self._has_prompt_logprobs:
            raise upstream_failed("The logprobs of the prompt were lost with a worker; try again.", "worker_lost")

    def _parts(self, piece: Piece) -> Sequence[tuple[Piece, bool]]:
        """What the client has of a piece, and what is new to it."""
        if self._covered is None:
            return ((piece, True),)
        if self._covered.ended[piece.index]:
            return ((piece, False),)
        known = self._covered.tokens[piece.index] - self._texts[piece.index].tokens
        if known <= 0:
            return ((piece, True),)
        if known >= len(piece.token_ids) and not piece.finish_reason:
            return ((piece, False),)
        head = Piece(piece.index, piece.token_ids[:known], (), 0, piece.cached_tokens)
        tail = Piece(piece.index, piece.token_ids[known:], (), piece.finish_reason, None)
        return ((head, False), (tail, True))

    def usage(self) -> Usage:
        """Tokens of all prompts and of all choices up to now."""
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
        self._firsts_s[piece.index] = now_s
        if self.first_s is None:
            self.first_s = now_s
        if not self._is_resumed:
            self._ttft.observe(now_s - self._generation.started_s)
        if piece.cached_tokens is not None:
            self._cached_tokens[piece.index] = piece.cached_tokens


def _by_token(piece: Piece) -> Iterator[Piece]:
    """The same in pieces of one token, what belongs to its beginning in the first and its end in the last."""
    last = len(piece.token_ids) - 1
    if last <= 0:
        yield piece
        return
    for place, token_id in enumerate(piece.token_ids):
        yield Piece(
            piece.index,
            [token_id],
            piece.logprobs[place : place + 1],
            piece.finish_reason if place == last else 0,
            piece.cached_tokens if place == 0 else None,
            piece.prompt_logprobs if place == 0 else (),
        )
