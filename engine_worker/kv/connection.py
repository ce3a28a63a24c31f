"""A connection between two agents: its handshake, its control messages, its end."""

import asyncio
import hmac
import logging
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import numpy as np

from engine_worker.kv.addresses import join, split_ports
from engine_worker.kv.fabric import KvEndpoint
from engine_worker.kv.layout import KvLayout, layout_mismatch
from engine_worker.kv.memory import Buffer
from engine_worker.kv.messages import (
    CONTROL_BYTES,
    KEY_BITS,
    PROTOCOL_VERSION,
    Control,
    Hello,
    Introduction,
    Rejection,
    control_tag,
    data_tag,
    decode,
    encode,
)
from engine_worker.kv.tokens import NONCE_BYTES, Challenge, ExportTokens, Purpose
from mesh.errors import DeadlineExceeded, KvTransferRefused, PeerUnavailable, ProtocolViolation, RpcError
from mesh.runtime import Entropy

log = logging.getLogger(__name__)

_GREETING = struct.Struct("<4sQ")
_MAGIC = b"PKV2"
_REJECTED = "it has shown no token of a transfer that is exported here now"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Host and port at which another transfer agent accepts connections. Of an instance whose KV is spread over ranks,
    that of the agent of the first rank, and the ports of the others in their order."""

    host: str
    port: int
    more_ports: tuple[int, ...] = ()
    token: str = field(default="", repr=False, compare=False)
    """Of the transfer that it is asked for (`kv.tokens`). Not in its text."""

    @classmethod
    def parse(cls, address: str) -> "PeerAddress":
        """From host:port or host:port,port..., an IPv6 host in brackets, maybe with TOKEN@ in front. Raises
        `KvTransferRefused` for anything else."""
        token, _, address = address.rpartition("@")
        try:
            host, (port, *more_ports) = split_ports(address)
        except ValueError as error:
            raise KvTransferRefused(f"{error} of a KV transfer agent") from error
        return cls(host, port, tuple(more_ports), token)

    @property
    def with_token(self) -> str:
        """What `parse` reads, the token included: for other processes, and for no log."""
        return f"{self.token}@{self}"

    @property
    def ranks(self) -> "tuple[PeerAddress, ...]":
        """Each agent's own address."""
        return tuple(PeerAddress(self.host, port, (), self.token) for port in (self.port, *self.more_ports))

    def __str__(self) -> str:
        return join(self.host, self.port, *self.more_ports)


class Connection:
    """Carries transfers both ways once `call` or `answer` has returned. Ends by `cut`, at whichever end."""

    def __init__(self, endpoint: KvEndpoint, hello: Hello, peer_name: str, entropy: Entropy) -> None:
        """`entropy` gives each connection a key of its own, which nobody can guess: what comes late for one that was
        cut never fits a receive of another, nor does what a stranger sends."""
        self._endpoint = endpoint
        self._hello = hello
        drawn = bytes.fromhex(entropy.token_hex(NONCE_BYTES + 8))
        self._nonce, self._key = drawn[:NONCE_BYTES], int.from_bytes(drawn[NONCE_BYTES:]) % 2**KEY_BITS
        self._peer_key = 0
        self._challenge = Challenge(b"", b"")
        self._is_caller = False
        self.peer_name = peer_name
        """For messages: its address until its id is known, then both."""
        self.refusal = ""
        """Why no block may move on it."""
        self.peer_layout: KvLayout = hello.layout
        """The peer's, once it has said it."""
        self.is_cut = False
        self.reason = ""
        """Why it was cut."""
        self.on_cut: list[Callable[[Connection], None]] = []
        self.on_heard: Callable[[], None] = lambda: None
        """Called for every message that has come, of whichever kind."""

    async def call(self, export_id: str, token: str, timeout_s: float) -> None:
        """Connect for a transfer. Cuts the connection and raises `KvTransferRefused` if the other side does not take
        the token, `ProtocolViolation` if it has not got it itself, or is no agent, `PeerUnavailable` or
        `DeadlineExceeded`."""
        self._is_caller = True
        await self._within(timeout_s, self._introduce(export_id, token))

    async def answer(self, tokens: ExportTokens, timeout_s: float) -> None:
        """Whoever has connected here. Raises as `call`, and `KvTransferRefused` for a stranger, who is told nothing."""
        await self._within(timeout_s, self._admit(tokens))

    def proof(self, token: str, export_id: str, transfer: int) -> bytes:
        """For a `Pull` on this connection."""
        return self._challenge.proof(token, Purpose.PULL, export_id, transfer)

    def is_shown(self, tokens: ExportTokens, export_id: str, transfer: int, proof: bytes) -> bool:
        """Whether a `Pull` that came on this connection has such a proof."""
        return tokens.is_shown(self._challenge, Purpose.PULL, export_id, proof, transfer)

    async def _within(self, timeout_s: float, greeting: Coroutine[None, None, None]) -> None:
        # A future of UCX must not be cancelled, so the time-out closes the endpoint, which ends them.
        too_late = f"no answer within {timeout_s:g} s"
        timer = asyncio.get_running_loop().call_later(timeout_s, self.cut, too_late)
        try:
            await greeting
        except ConnectionError as error:
            was_cut = self.is_cut
            self.cut(str(error))
            if self.reason == too_late:
                raise DeadlineExceeded(f"the KV agent at {self.peer_name} gave {too_late}; is it hung?") from error
            if was_cut:
                raise self.lost() from error
            raise PeerUnavailable(f"the KV agent at {self.peer_name} cannot be reached ({error})") from error
        except (ProtocolViolation, KvTransferRefused) as error:
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

    async def _exchange_keys(self) -> None:
        sent = self._endpoint.send_stream(np.frombuffer(_GREETING.pack(_MAGIC, self._key) + self._nonce, np.uint8))
        # The nonce by itself: an agent of another release sends less, and would be waited for.
        answer, nonce = np.empty(_GREETING.size, np.uint8), np.empty(NONCE_BYTES, np.uint8)
        await self._endpoint.receive_stream(answer)
        magic, self._peer_key = _GREETING.unpack(answer.tobytes())
        if magic != _MAGIC:
            raise ProtocolViolation(
                f"what is at {self.peer_name} is no KV agent of this release; use the agent's port, and one release"
            )
        await self._endpoint.receive_stream(nonce)
        await sent
        theirs = nonce.tobytes()
        self._challenge = Challenge(self._nonce, theirs) if self._is_caller else Challenge(theirs, self._nonce)

    async def _introduce(self, export_id: str, token: str) -> None:
        await self._exchange_keys()
        proof = self._challenge.proof(token, Purpose.CONNECT, export_id)
        self.send(Introduction(PROTOCOL_VERSION, export_id, proof))
        theirs = await self._next()
        if isinstance(theirs, Rejection):
            raise KvTransferRefused(f"the KV agent at {self.peer_name} rejects {export_id!r}: {theirs.reason}")
        self._heard_hello(theirs)
        assert isinstance(theirs, Hello), "it was looked at"
        if not hmac.compare_digest(theirs.proof, self._challenge.proof(token, Purpose.ACCEPT, export_id)):
            raise ProtocolViolation(f"what is at {self.peer_name} does not know {export_id!r}: it is not its source")
        self.send(self._hello)

    async def _admit(self, tokens: ExportTokens) -> None:
        await self._exchange_keys()
        theirs = await self._next()
        if not isinstance(theirs, Introduction):
            raise ProtocolViolation(f"{self.peer_name} began with a {type(theirs).__name__}")
        if theirs.protocol != PROTOCOL_VERSION:
            await self._reject(f"this KV agent speaks version {PROTOCOL_VERSION}, not {theirs.protocol}")
        if not tokens.is_shown(self._challenge, Purpose.CONNECT, theirs.export_id, theirs.proof):
            await self._reject(_REJECTED)
        proof = tokens.proof(self._challenge, Purpose.ACCEPT, theirs.export_id)
        self.send(msgspec.structs.replace(self._hello, proof=proof))
        self._heard_hello(await self._next())

    async def _reject(self, reason: str) -> NoReturn:
        self.send(Rejection(reason))
        # Cutting it now would take the message along: the caller hangs up, or its time is over.
        with suppress(ConnectionError):
            await self._endpoint.receive(np.empty(CONTROL_BYTES, np.uint8), control_tag(self._key))
        raise KvTransferRefused(f"{self.peer_name} was rejected: {reason}")

    async def _next(self) -> Control:
        frame = np.empty(CONTROL_BYTES, np.uint8)
        await self._endpoint.receive(frame, control_tag(self._key))
        return decode(frame.tobytes())

    def _heard_hello(self, theirs: Control) -> None:
        if not isinstance(theirs, Hello):
            raise ProtocolViolation(f"the KV agent at {self.peer_name} began with a {type(theirs).__name__}")
        if theirs.protocol != PROTOCOL_VERSION:
            raise ProtocolViolation(
                f"the KV agent at {self.peer_name} speaks version {theirs.protocol}, this one {PROTOCOL_VERSION}"
            )
        self.peer_name = f"{theirs.agent_id} at {self.peer_name}"
        self.peer_layout = theirs.layout
        self.refusal = layout_mismatch(self._hello.layout, theirs.layout)

    def _arrived(self, future: asyncio.Future[None]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.on_heard()

    def _sent(self, future: asyncio.Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self.cut(str(error))
