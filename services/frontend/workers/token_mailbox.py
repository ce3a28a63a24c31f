"""What workers send and a client has not taken yet: bounded, many writers, one reader."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from penstock.v1 import request_pb2
from services.frontend.errors import ApiError, client_too_slow


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine step added to one choice."""

    index: int
    token_ids: list[int]
    logprobs: Sequence[request_pb2.PositionLogprobs]
    finish_reason: int
    """A `request_pb2.FinishReason`, unspecified while the choice goes on."""
    cached_tokens: int | None
    prompt_logprobs: Sequence[request_pb2.PositionLogprobs] = ()
    """Of the prompt's tokens but the first."""


class TokenMailbox:
    """Of one client request, all its choices together. Unlike `mesh.mailbox.Mailbox` it counts tokens, and fails when
    too many wait.

    The reader takes all that waits at once, so a client that falls behind gets fewer and larger writes.
    """

    __slots__ = ("_error", "_max_pending_tokens", "_on_overflow", "_pending_tokens", "_pieces", "_waiter")

    def __init__(self, max_pending_tokens: int, on_overflow: Callable[[], None]) -> None:
        """`on_overflow` is called once, when more tokens wait than `max_pending_tokens`."""
        self._pieces: list[Piece] = []
        self._pending_tokens = 0
        self._max_pending_tokens = max_pending_tokens
        self._on_overflow = on_overflow
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        """Add a piece; dropped once the mailbox has failed."""
        if self._error is not None:
            return
        self._pieces.append(piece)
        self._pending_tokens += len(piece.token_ids)
        if self._pending_tokens > self._max_pending_tokens:
            self.fail(client_too_slow())
            self._on_overflow()
        self._wake()

    def preload(self, piece: Piece, max_pending_tokens: int) -> None:
        """Put what a choice brings along, however long it is; `max_pending_tokens` more may wait from now on."""
        self._max_pending_tokens += len(piece.token_ids) + max_pending_tokens
        self.put(piece)

    def discard(self, index: int) -> None:
        """Forget what waits of a choice."""
        self._pending_tokens -= sum(len(piece.token_ids) for piece in self._pieces if piece.index == index)
        self._pieces = [piece for piece in self._pieces if piece.index != index]

    def fail(self, error: ApiError) -> None:
        """End it; the reader gets what is here already and then the error. The first error stays."""
        if self._error is None:
            self._error = error
            self._wake()

    @property
    def is_awaited(self) -> bool:
        """Whether the reader waits for more; otherwise it is busy with what it took."""
        return self._waiter is not None

    @property
    def error(self) -> ApiError | None:
        """Why it ended, if it has."""
        return self._error

    def wait(self) -> Awaitable[None]:
        """Done once `take` has something to return or to raise. A future rather than a coroutine, so that a token
        resumes nothing between the mailbox and whoever sends it on."""
        waiter = asyncio.get_running_loop().create_future()
        if self._pieces or self._error is not None:
            waiter.set_result(None)
        else:
            self._waiter = waiter
        return waiter

    def take(self) -> list[Piece]:
        """All pieces that have come. Raises the ApiError it was failed with once those before it were taken."""
        self._waiter = None
        if not self._pieces and self._error is not None:
            raise self._error
        pieces, self._pieces, self._pending_tokens = self._pieces, [], 0
        return pieces

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
