"""What a servicer gets for a framed stream: `grpc.aio`'s context."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from mesh.errors import PeerUnavailable
from mesh.rpc.framed.frames import FrameKind
from mesh.rpc.framed.stream import FramedStream
from mesh.rpc.framed.tickets import Caller
from penstock.v1 import frames_pb2


class CallContext(grpc.aio.ServicerContext):
    """One call, as its servicer sees it. There are no metadata and nothing is compressed."""

    def __init__(self, caller: Caller, timeout_s: float | None) -> None:
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self.is_status_sent = False
        self.is_caller_gone = False

    def send_status(self, code: grpc.StatusCode, details: str) -> None:
        """The last that the caller hears. Only the first one counts."""
        raise NotImplementedError

    async def read(self) -> Any:
        raise NotImplementedError("this call has one request, which its servicer was given")

    async def write(self, message: Any) -> None:
        raise NotImplementedError("this call has one answer, which its servicer returns")

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status. Raises, always."""
        self.send_status(code, details)
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """As `abort`."""
        await self.abort(status.code, status.details)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        raise NotImplementedError("framed calls have no metadata")

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        raise NotImplementedError("framed calls have no metadata")

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return self._details

    def set_compression(self, compression: grpc.Compression) -> None:
        raise NotImplementedError("framed calls are not compressed")

    def disable_next_message_compression(self) -> None:
        """Nothing is compressed."""

    def peer(self) -> str:
        """The address from which the caller asked for its ticket."""
        return self._caller.peer

    def peer_identities(self) -> None:
        return None

    def peer_identity_key(self) -> None:
        return None

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        """The names in the caller's certificate, where it has one."""
        return {"x509_subject_alternative_name": self._caller.names} if self._caller.names else {}

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._loop.time())

    def cancelled(self) -> bool:
        return self.is_caller_gone

    def done(self) -> bool:
        return self.is_caller_gone or self.is_status_sent

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        raise NotImplementedError("no servicer of a framed call asks for it")


class FramedContext(CallContext):
    """Of a stream."""

    def __init__(self, stream: FramedStream, caller: Caller, timeout_s: float | None) -> None:
        super().__init__(caller, timeout_s)
        self._stream = stream
        self._serialize: Callable[[Any], bytes] = bytes
        self._deserialize: Callable[[bytes], Any] = bytes

    def use(self, handler: grpc.RpcMethodHandler) -> None:
        """Read and write messages as this handler's method has them."""
        self._serialize = handler.response_serializer or bytes
        self._deserialize = handler.request_deserializer or bytes

    async def messages(self) -> AsyncIterator[Any]:
        """The caller's messages."""
        while (raw := await self._stream.read()) is not None:
            yield self._deserialize(raw)

    async def read(self) -> Any:
        """The caller's next message, or grpc.aio.EOF."""
        raw = await self._stream.read()
        return grpc.aio.EOF if raw is None else self._deserialize(raw)

    async def write(self, message: Any) -> None:
        """Return once there is room for more. Raises PeerUnavailable when the call has ended."""
        if self.is_status_sent or self.is_caller_gone:
            raise PeerUnavailable("the call has ended")
        await self._stream.write(self._serialize(message))

    def send_status(self, code: grpc.StatusCode, details: str) -> None:
        """The last that the caller hears. Only the first one counts."""
        if not self.is_status_sent:
            self.is_status_sent = True
            status = frames_pb2.FramedStatus(code=code.value[0], details=details)
            self._stream.send(FrameKind.STATUS, status.SerializeToString())


class UnaryContext(CallContext):
    """Of one unary call among those on a stream."""

    status: tuple[grpc.StatusCode, str] | None = None
    """What `send_status` was told."""

    def send_status(self, code: grpc.StatusCode, details: str) -> None:
        if not self.is_status_sent:
            self.is_status_sent, self.status = True, (code, details)
