"""One response that is made in the background, as the frontend that makes it has it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import msgspec

from mesh.membership import Member
from penstock.v1 import frontend_pb2
from services.frontend.requests.response_store import StoredResponse

log = logging.getLogger(__name__)

_EVENT_END: Final = b"\n\n"


class ResponseStatus(StrEnum):
    """Those of a response that has no output to show."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    CANCELLED = "cancelled"
    FAILED = "failed"


UNFINISHED: Final = frozenset((ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS))


class Stop(StrEnum):
    """Why a response is not made any longer here."""

    CANCELLED = "cancelled"
    """Its client does not want it."""
    FORGOTTEN = "forgotten"
    """It was never promised, or is deleted."""
    MADE_ELSEWHERE = "made_elsewhere"
    PROCESS_STOPS = "process_stops"
    """Another frontend goes on with it."""


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """A response in the background, as another frontend can go on with it."""

    response_id: str
    queued: StoredResponse
    """As it was first given, with the conversation up to the answer."""
    request_id: str
    """Of the request that makes it, by which the workers know it."""
    chat: bytes
    """Body of the chat completion that it is."""
    is_streamed: bool
    """Its client reads it as a stream, and may read it again."""

    @property
    def size_bytes(self) -> int:
        return self.queued.size_bytes + len(self.chat)

    @classmethod
    def from_message(cls, message: frontend_pb2.BackgroundWork) -> "BackgroundWork":
        """From another frontend. Raises ValueError for what none sends."""
        queued = StoredResponse.from_message(message.queued)
        return cls(message.queued.response_id, queued, message.request_id, message.chat, message.is_streamed)

    def to_message(self) -> frontend_pb2.BackgroundWork:
        """For another frontend."""
        return frontend_pb2.BackgroundWork(
            queued=self.queued.to_message(self.response_id),
            request_id=self.request_id,
            chat=self.chat,
            is_streamed=self.is_streamed,
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """How a response has ended."""

    response: bytes
    turn: dict[str, Any] | None = None
    """The answer as a chat message; None: there is none."""


class RunningResponse:
    """A response that this frontend makes."""

    def __init__(self, work: BackgroundWork, reserve: Callable[[int], bool]) -> None:
        """`reserve`: takes so many bytes for events, or gives them back where they are negative; False: there is no
        room for them."""
        self.work = work
        self.status = ResponseStatus.QUEUED
        self.making: asyncio.Future[Ended | None] | None = None
        self.task: asyncio.Task[None] | None = None
        """Sees `making` through, and keeps what comes of it."""
        self.entrusting: asyncio.Task[None] | None = None
        """Sees to it that there is a `holder`."""
        self.was_entrusted = asyncio.Event()
        """The others have been asked once."""
        self.holder: Member | None = None
        """The frontend that goes on with it if this one is lost."""
        self.stopped: Stop | None = None
        self.is_over = False
        self.events: list[bytes] = []
        self.events_bytes = 0
        self._reserve = reserve
        self._changed = asyncio.Event()

    def state(self) -> StoredResponse:
        """As it is now: without what has been written of it, as OpenAI has it."""
        return replace(self.work.queued, response=self.without_output(self.status), is_running=True)

    def without_output(self, status: ResponseStatus) -> bytes:
        """The response with this status."""
        return msgspec.json.encode({**msgspec.json.decode(self.work.queued.response), "status": status})

    def add(self, events: bytes) -> None:
        """Whole events, for those who follow, as far as there is room; behind that they have no more."""
        if not self.work.is_streamed:
            return
        for event in split_events(events):
            if not self._reserve(len(event)):
                log.warning("a response has too many events to be kept", extra={"response_id": self.work.response_id})
                self.work = replace(self.work, is_streamed=False)
                break
            self.events.append(event)
            self.events_bytes += len(event)
        self._wake()

    def leave_events(self) -> None:
        """Go on with it as with one that nobody reads as a stream."""
        self.work = replace(self.work, is_streamed=False)
        self.events.clear()
        self._give_back()
        self._wake()

    def stop(self, why: Stop) -> None:
        """Make it no longer; the first reason holds."""
        self.stopped = self.stopped or why
        if self.making is not None:
            self.making.cancel()

    def end(self) -> None:
        """Whoever follows has all there is, and whoever waits goes on."""
        self.is_over = True
        self.was_entrusted.set()
        self._give_back()
        self._wake()

    async def follow(self, after: int | None) -> AsyncGenerator[bytes, None]:
        """Events behind the one of that number, as they come."""
        seen = number_behind(after)
        while True:
            changed = self._changed
            if seen < len(self.events):
                new = self.events[seen:]
                seen += len(new)
                yield b"".join(new)
            elif self.is_over or not self.work.is_streamed:
                return
            else:
                await changed.wait()

    def _give_back(self) -> None:
        self._reserve(-self.events_bytes)
        self.events_bytes = 0

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def split_events(events: bytes) -> list[bytes]:
    """Without comments, which keep connections alive and have no number."""
    each = (event for event in events.split(_EVENT_END) if event and not event.startswith(b":"))
    return [event + _EVENT_END for event in each]


def number_behind(after: int | None) -> int:
    """Of the first event that a client lacks which has the one of the number `after`, or none."""
    return 0 if after is None else after + 1
