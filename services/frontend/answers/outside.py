"""An answer on its way through the parser process, where this frontend has no parser of its own for its format."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from services.frontend.answers.choice import ChoicePiece
from services.frontend.answers.sender import PieceSource
from services.frontend.parser_process.answer import OutsideAnswer, Part
from services.frontend.parsers.deltas import MessageDelta
from services.frontend.requests.plan import GenerationPlan

SLOW_S: Final = 0.25
"""From then on tokens that come meanwhile are taken from where they wait, which is bounded."""


class OutsidePieces:
    """A `PieceSource` whose pieces have their messages; `close` it. Give what its client has to `covered` before."""

    def __init__(self, source: PieceSource, plan: GenerationPlan, deadline_s: float, *, is_whole: bool) -> None:
        """`is_whole`: the answer is read at its end."""
        parsers, request = plan.model.outside, plan.read_by
        assert parsers is not None, "the plan was made for the parser process"
        assert request is not None, "the same"
        self._source = source
        self._is_whole = is_whole
        self._waiting: list[tuple[ChoicePiece, bool]] = []
        """Pieces to be read, and whether they are new to the client."""
        self._ready: list[ChoicePiece] = []
        self._held: list[list[Part]] = [[] for _ in range(len(plan.prompts) * plan.n)]
        """Of answers that are read at their end."""
        make: Callable[[int], OutsideAnswer] = lambda choice: parsers.answer(  # noqa: E731
            request,
            plan.prompts[choice // plan.n].token_ids,
            f"{plan.request_id}/{choice}",
            deadline_s,
            is_whole=is_whole,
        )
        self._answers = [make(choice) for choice in range(len(self._held))]

    @property
    def done(self) -> bool:
        return self._source.done and not self._waiting and not self._ready

    def covered(self, piece: ChoicePiece) -> None:
        """The client of a resumed stream has this piece: it is read, and left out."""
        self._waiting.append((piece, False))

    async def wait(self) -> None:
        """See `PieceSource`. Raises ApiError if the generation fails or cannot be read."""
        while not self._ready and not self.done:
            if not self._waiting:
                await self._source.wait()
                self._take()
            await self._read_waiting()

    def read(self) -> Sequence[ChoicePiece]:
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Nothing more is wanted."""
        for answer in self._answers:
            answer.close()

    def _take(self) -> None:
        taken = self._source.read()  # which says what is covered, before what is new
        self._waiting += [(piece, True) for piece in taken]

    async def _read_waiting(self) -> None:
        """A process that is lost takes seconds to come back; tokens come all the while, and a mailbox that overflows
        is taken for a client that does not read."""
        waiting, self._waiting = self._waiting, []
        work = asyncio.ensure_future(self._read_pieces(waiting))
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=SLOW_S)
                if not work.done():
                    self._take()
        finally:
            work.cancel()
        work.result()

    async def _read_pieces(self, pieces: Sequence[tuple[ChoicePiece, bool]]) -> None:
        for piece, is_new in pieces:
            message = await self._read_piece(piece)
            if is_new:
                self._ready.append(replace(piece, message=message))

    async def _read_piece(self, piece: ChoicePiece) -> MessageDelta:
        parts, is_end = list(piece.parts), piece.finish is not None
        if self._is_whole:
            held = self._held[piece.index]
            held += parts
            if not is_end:
                return MessageDelta()
            parts = held
        return await self._answers[piece.index].read(parts, is_end=is_end)
