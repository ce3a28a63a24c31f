"""An answer onto the wire, as ASGI messages."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

from starlette.types import Send

from services.frontend.answers.choice import ChoicePiece
from services.frontend.answers.event_ids import EventIds
from services.frontend.answers.formats import AnswerFormat, StreamFormat, WholeAnswer, WholeChoice
from services.frontend.answers.schema import Usage
from services.frontend.answers.sse import DONE_EVENT, event

_EVENTS: Final = "text/event-stream; charset=utf-8"


class PieceSource(Protocol):
    """An answer that is still being written."""

    @property
    def done(self) -> bool:
        """Whether the answer has ended: nothing is left to wait for."""

    def wait(self) -> Awaitable[None]:
        """Done once there is something to `read`."""

    def read(self) -> Sequence[ChoicePiece]:
        """What has become visible; may be empty. Raises ApiError if the generation failed."""


class AnswerSender:
    """Of one request. Nothing is sent before the first tokens are there, so that whatever fails until then is
    answered with a status of its own."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: dict[str, str] = {}
        """Add to them before anything is sent."""
        self.late_headers: Callable[[], Awaitable[Mapping[str, str]]] | None = None
        """Those of an answer in one piece that are wanted as of its end; None: there are none."""
        self.started = False
        """Whether the status has been sent."""

    async def stream(
        self,
        reader: PieceSource,
        form: StreamFormat,
        usage: Callable[[], Usage] | None,
        ids: EventIds | None = None,
        *,
        first_events_had: int | None = 0,
    ) -> None:
        """Events as they come; waits for a client that reads slowly. Raises ApiError if the generation fails.

        `usage`: of the whole stream, asked for at its end; None: the client does not want it, or has it. `ids`: by
        which the stream can be resumed; `first_events_had`: of the events before the first token, None: all.
        """
        await reader.wait()
        pieces = reader.read()
        await self._start_events()
        body = form.first_events()
        if ids is not None:
            body = ids.of_first_events(body, first_events_had)
        while True:
            for piece in pieces:
                shown = form.event(piece)
                if shown and ids is not None:
                    body += ids.after(piece)
                body += shown
            if reader.done:
                break
            if body:
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
            await reader.wait()
            pieces = reader.read()
        if usage is not None:
            if ids is not None:
                body += ids.with_usage()
            body += form.usage_event(usage())
        await self._end(body + DONE_EVENT)

    async def whole(self, reader: PieceSource, form: AnswerFormat, choices: int, usage: Callable[[], Usage]) -> None:
        """The answer in one piece, with the usage at its end. Raises ApiError if the generation fails."""
        pieces: list[list[ChoicePiece]] = [[] for _ in range(choices)]
        while not reader.done:
            await reader.wait()
            for piece in reader.read():
                pieces[piece.index].append(piece)
        await self._send_whole(form.whole([WholeChoice.of(each) for each in pieces], usage()))

    async def stream_at_once(self, answer: WholeAnswer, form: AnswerFormat, include_usage: bool) -> None:
        """The events of an answer that is all there."""
        await self._start_events()
        piece = ChoicePiece(0, answer.text, answer.positions, answer.finish, stop_reason=answer.stop_reason)
        usage = form.usage_event(answer.usage) if include_usage else b""
        await self._end(form.first_events() + form.event(piece) + usage + DONE_EVENT)

    async def whole_at_once(self, answer: WholeAnswer, form: AnswerFormat) -> None:
        """The body of an answer that is all there."""
        choice = WholeChoice(0, answer.text, answer.positions, answer.finish, stop_reason=answer.stop_reason)
        await self._send_whole(form.whole([choice], answer.usage))

    async def keep_alive(self, comment: bytes) -> None:
        """Tell a stream's client that its answer is still being worked on."""
        await self._start_events()
        await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    async def fail(self, error: bytes) -> None:
        """End a stream that has begun with a JSON error. No [DONE] follows it, because the answer is not done."""
        await self._end(event(error))

    async def _send_whole(self, body: bytes) -> None:
        if self.late_headers is not None:
            self.headers |= await self.late_headers()
        await self._start("application/json", {"content-length": str(len(body))})
        await self._end(body)

    async def _start_events(self) -> None:
        if not self.started:
            await self._start(_EVENTS, {"cache-control": "no-cache"})

    async def _start(self, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        fields = {"content-type": content_type, **headers, **self.headers}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": encoded})

    async def _end(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
