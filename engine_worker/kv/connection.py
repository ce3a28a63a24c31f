"""A connection between two agents: its handshake, its control messages, its end."""

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine_worker.kv.fabric import KvEndpoint
from engine_worker.kv.layout import layout_mismatch
from engine_worker.kv.memory import Buffer
from engine_worker.kv.messages import (
    CONTROL_BYTES,
    PROTOCOL_VERSION,
    Control,
    Hello,
    control_tag,
    data_tag,
    decode,
    encode,
)
from mesh.errors import DeadlineExceeded, PeerUnavailable, ProtocolViolation, RpcError

log = logging.getLogger(__name__)

_GREETING = struct.Struct("<4sI")
_MAGIC = b"PKV1"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Host and port at which another transfer agent accepts connections."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Connection:
    """Carries transfers both ways once `greet` has returned. Ends by `cut`, at whichever end."""

    def __init__(self, endpoint: KvEndpoint, hello: Hello, peer_name: str, key: int) -> None:
        """`key` is another one for each connection of an agent: what comes late for one that was cut never fits a
        receive of another."""
        self._endpoint = endpoint
        self._hello = hello
        self._key = key
        self._peer_key = 0
        self.peer_name = peer_name
        """For messages: its address until its id is known, then both."""
        self.refusal = ""
        """Why no block may move on it."""
        self.is_cut = False
        self.reason = ""
        """Why it was cut."""
        self.on_cut: list[Callable[[Connection], None]] = []
        self.on_heard: Callable[[], None] = lambda: None
        """Called for every message that has come, of whichever kind."""

    async def greet(self, timeout_s: float) -> None:
        """Exchange keys and hellos. Cuts the connection and raises `PeerUnavailable`, `DeadlineExceeded` or
        `ProtocolViolation` if the other side does not do the same."""
        # A future of UCX must not be cancelled, so the time-out closes the endpoint, which ends them.
        timer = asyncio.get_running_loop().call_later(timeout_s, self.cut, f"no answer within {timeout_s:g} s")
        try:
            await self._exchange()
        except ConnectionError as error:
            timed_out = self.is_cut
            self.cut(str(error))
            if timed_out:
                raise DeadlineExceeded(f"the KV agent at {self.peer_name} gave {self.reason}; is it hung?") from error
            raise PeerUnavailable(f"the KV agent at {self.peer_name} cannot be reached ({error})") from error
        except ProtocolViolation as error:
            self.cut(str(error))
            raise
        finally:
            timer.cancel()

    def send(self, message: Control) -> None:
        """Queue a control message; order is kept. Where it fails the connection ends."""
        frame = np.frombuffer(encode(message), np.uint8)
        self._endpoint.send(frame, control_tag(self._peer_key)).add_done_callback(self._sent)

    async def listen(self, handle: Callable[[Control], None]) -> None:
        """Hand every control message to `handle` until the connection ends."""
        buffer = np.empty(CONTROL_BYTES, np.uint8)
        while True:
            try:
                await self._endpoint.receive(buffer, control_tag(self._key))
                self.on_heard()
                handle(decode(buffer.tobytes()))
            except (ConnectionError, ProtocolViolation) as error:
                self.cut(str(error))
                return

    def send_data(self, transfer: int, buffer: Buffer) -> asyncio.Future[None]:
        """Send one message of block data of this transfer; done once `buffer` may be reused."""
        return self._endpoint.send(buffer, data_tag(self._peer_key, transfer), is_data=True)

    def receive_data(self, transfer: int, buffer: Buffer) -> asyncio.Future[None]:
        """The next message of blocks of a transfer."""
        receiving = self._endpoint.receive(buffer, data_tag(self._key, transfer), is_data=True)
        receiving.add_done_callback(self._arrived)
        return receiving

    def cut(self, reason: str) -> None:
        """End it now, with all its transfers; no effect the second time."""
        if self.is_cut:
            return
        self.is_cut, self.reason = True, reason
        self._endpoint.close()
        for callback in self.on_cut:
            callback(self)

    def lost(self) -> RpcError:
        """The error of a transfer that the end of the connection ended."""
        return PeerUnavailable(f"the connection to the KV agent {self.peer_name} ended: {self.reason}")

    async def _exchange(self) -> None:
        greeting = np.frombuffer(_GREETING.pack(_MAGIC, self._key), np.uint8)
        answer = np.empty(_GREETING.size, np.uint8)
        sent = self._endpoint.send_stream(greeting)
        await self._endpoint.receive_stream(answer)
        await sent
        magic, self._peer_key = _GREETING.unpack(answer.tobytes())
        if magic != _MAGIC:
            raise ProtocolViolation(f"what listens at {self.peer_name} is no KV agent; use the agent's port")
        frame = np.empty(CONTROL_BYTES, np.uint8)
        self.send(self._hello)
        await self._endpoint.receive(frame, control_tag(self._key))
        theirs = decode(frame.tobytes())
        if not isinstance(theirs, Hello):
            raise ProtocolViolation(f"the KV agent at {self.peer_name} began with a {type(theirs).__name__}")
        if theirs.protocol != PROTOCOL_VERSION:
            raise ProtocolViolation(
                f"the KV agent at {self.peer_name} speaks version {theirs.protocol}, this one {PROTOCOL_VERSION}"
            )
        self.peer_name = f"{theirs.agent_id} at {self.peer_name}"
        self.refusal = layout_mismatch(self._hello.layout, theirs.layout)

    def _arrived(self, future: asyncio.Future[None]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.on_heard()

    def _sent(self, future: asyncio.Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self.cut(str(error))
