"""The caller's side of a framed stream: what `grpc.aio`'s stream-stream call is to those who read and write it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from mesh.errors import PeerUnavailable, PenstockError, ProtocolViolation, RpcError
from mesh.rpc.framed.frames import FrameKind
from mesh.rpc.framed.stream import FramedStream
from penstock.v1 import frames_pb2

log = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S: Final = 5.0
ENDED: Final = "RPC already finished."
CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


class NotFramed(PenstockError):
    """There is no framed stream to this peer, and that is as it should be: it has no socket for one, such as an earlier
    release."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a stream gets to a peer that has given a ticket for it."""

    transport_name: str
    """unix or tcp."""
    ticket: bytes
    proof: bytes
    connect: Callable[[FramedStream], Awaitable[None]]
    """Joins the stream to the peer's socket. Raises PeerUnavailable."""


Opening = Callable[[], Awaitable[Way]]


class FramedCall:
    """One stream. Until it is open, and if it cannot be opened, `fall_back` makes the call that takes its place.

    As by gRPC: what fails is raised as AioRpcError where it is read; whoever writes to a call that has ended gets
    InvalidStateError; a call that was cancelled here raises CancelledError.
    """

    def __init__(
        self,
        opening: Opening,
        method: str,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        requests: AsyncIterator[Any] | None,
        timeout_s: float | None,
        on_open: Callable[[str], None],
        fall_back: Callable[[PenstockError], Any],
        on_end: Callable[[], None],
    ) -> None:
        """`opening` asks for a ticket: raises NotFramed or RpcError. `on_open` is told what carries the stream that is
        there; `fall_back` makes the call in its place, or returns None, and this one ends as UNAVAILABLE; `on_end` is
        called when neither is needed any more."""
        self._method = method
        self._serialize = serialize
        self._deserialize = deserialize
        self._on_open = on_open
        self._fall_back = fall_back
        self._on_end = on_end
        self._requests = requests
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._stream: FramedStream | None = None
        self._proof = b""
        self._carrier = ""
        self._accepted: asyncio.Future[str] = self._loop.create_future()
        """Why the peer will not have it; empty if it will."""
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._is_cancelled = False
        self._grpc: Any = None
        self._sending: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._opening = self._loop.create_task(self._open(opening), name=f"open {method}")

    @property
    def transport_name(self) -> str:
        """What carries it: unix, tcp or grpc; empty until that is known."""
        if self._grpc is not None:
            return "grpc"
        return self._carrier if self._opening.done() else ""

    # -- what grpc.aio has

    def __aiter__(self) -> "FramedCall":
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        if not self._opening.done():
            await self._opened()
        if self._grpc is not None:
            return await self._grpc.read()
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._stream is None:
            raise call_error(*self._end_of_answer())
        try:
            raw = await self._stream.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if raw is not None:
            return self._decoded(raw)
        if self._is_cancelled:
            raise asyncio.CancelledError
        code, details = self._end_of_answer()
        if code is not grpc.StatusCode.OK:
            raise call_error(code, details)
        return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        """Return once there is room for more."""
        if not self._opening.done():
            await self._opened()
        if self._grpc is not None:
            await self._grpc.write(message)
            return
        if self._status is not None or self._is_cancelled:
            raise asyncio.InvalidStateError(ENDED)
        assert self._stream is not None, "it was opened"
        try:
            await self._stream.write(self._serialize(message))
        except ProtocolViolation as error:
            self._give_up(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            raise call_error(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        except PeerUnavailable:
            if self._is_cancelled:
                raise asyncio.CancelledError from None
            raise call_error(*self._end_of_answer()) from None
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self) -> None:
        """The peer hears that nothing more comes."""
        await self._opened()
        if self._grpc is not None:
            await self._grpc.done_writing()
        elif self._stream is not None:
            self._stream.send(FrameKind.HALF_CLOSE)

    def cancel(self) -> bool:
        """Give it up; False if it had ended."""
        if self._grpc is not None:
            return bool(self._grpc.cancel())
        if self.done():
            return False
        self._is_cancelled = True
        self._opening.cancel()
        self._close()
        return True

    def done(self) -> bool:
        """Whether it has ended and, if well, has been read to its end."""
        if self._grpc is not None:
            return bool(self._grpc.done())
        if self._is_cancelled:
            return True
        return self._status is not None and (self._stream is None or not self._stream.has_unread)

    def cancelled(self) -> bool:
        """Whether it was given up here."""
        return bool(self._grpc.cancelled()) if self._grpc is not None else self._is_cancelled

    # -- opening

    async def _open(self, opening: Opening) -> None:
        try:
            await self._connect(await opening())
        except (RpcError, NotFramed) as error:
            self._stream = None
            self._grpc = self._fall_back(error)
            if self._grpc is None:
                self._ended(grpc.StatusCode.UNAVAILABLE, str(error))
                self._on_end()
                return
            self._grpc.add_done_callback(lambda _: self._on_end())
            return
        self._on_open(self._carrier)
        if self._status is not None:  # it has ended with its first frames
            self._on_end()
            return
        if self._timeout_s is not None:
            late = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._deadline = self._loop.call_later(self._timeout_s, self._give_up, *late)
        if self._requests is not None:
            self._sending = self._loop.create_task(self._send(self._requests), name=f"send {self._method}")

    async def _connect(self, way: Way) -> None:
        """Return once the peer has accepted the stream. Raises RpcError."""
        self._proof, self._carrier = way.proof, way.transport_name
        stream = self._stream = FramedStream(self._on_control, self._on_lost)
        try:
            await way.connect(stream)
            call = frames_pb2.FramedCall(ticket=way.ticket, method=self._method, timeout_s=self._timeout_s)
            stream.send(FrameKind.CALL, call.SerializeToString())
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                refusal = await self._accepted
        except TimeoutError:
            stream.close()
            raise PeerUnavailable(f"the socket did not answer within {ACCEPT_TIMEOUT_S:g} s") from None
        except BaseException:
            stream.close()
            raise
        if refusal:
            stream.close()
            raise PeerUnavailable(refusal)

    async def _opened(self) -> None:
        """Return once the stream, or a call in its place, is there; raises CancelledError if it was given up."""
        await asyncio.wait((self._opening,))
        if self._is_cancelled:
            raise asyncio.CancelledError
        self._opening.result()

    # -- what the stream says

    def _on_control(self, kind: FrameKind, payload: bytes) -> None:
        try:
            if kind is FrameKind.ACCEPT and not self._accepted.done():
                self._take_accept(frames_pb2.FramedAccept.FromString(payload))
            elif kind is FrameKind.STATUS:
                self._take_status(frames_pb2.FramedStatus.FromString(payload))
            else:
                raise ProtocolViolation(f"an unexpected frame came: {kind.name}")
        except DecodeError as error:
            raise ProtocolViolation(f"a frame {kind.name} cannot be read: {error}") from None

    def _take_accept(self, accept: frames_pb2.FramedAccept) -> None:
        if accept.proof != self._proof:
            raise ProtocolViolation("another process answers at the socket")
        assert self._stream is not None, "it has brought this"
        self._stream.takes_messages = True
        self._accepted.set_result("")

    def _take_status(self, status: frames_pb2.FramedStatus) -> None:
        code = CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        if not self._accepted.done():
            self._accepted.set_result(f"the socket answers {code.name}: {status.details}")
        self._ended(code, status.details)
        self._close()

    def _on_lost(self, reason: str) -> None:
        if not self._accepted.done():
            self._accepted.set_result(reason)
        self._ended(grpc.StatusCode.UNAVAILABLE, reason)

    # -- the end

    def _give_up(self, code: grpc.StatusCode, details: str) -> None:
        self._ended(code, details)
        self._close()

    def _ended(self, code: grpc.StatusCode, details: str) -> None:
        if self._status is None:
            self._status = (code, details)
        self._stop_sending()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stop_sending()

    def _stop_sending(self) -> None:
        for handle in (self._sending, self._deadline):
            if handle is not None:
                handle.cancel()
        if self._grpc is None and (self._opening.done() or self._is_cancelled):
            self._on_end()

    def _end_of_answer(self) -> tuple[grpc.StatusCode, str]:
        assert self._status is not None, "what ends the stream says why"
        return self._status

    async def _send(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                await self.write(request)
            await self.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # whoever reads hears of it

    def _decoded(self, raw: bytes) -> Any:
        try:
            return self._deserialize(raw)
        except DecodeError as error:
            self._give_up(grpc.StatusCode.INTERNAL, f"an answer cannot be read: {error}")
            raise call_error(grpc.StatusCode.INTERNAL, f"an answer cannot be read: {error}") from None


def call_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """As gRPC raises it where an answer is read."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
