"""Calls with deadlines to the first of several endpoints that answers; shared by the stores behind gRPC."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import grpc

from mesh.backoff import Backoff
from mesh.errors import LeaseLost, StoreCompacted, StoreError, StoreRefused, StoreUnavailable
from mesh.rpc.limits import CHANNEL_OPTIONS
from mesh.runtime import Runtime, Transport

Stubs = TypeVar("Stubs")
Answer = TypeVar("Answer")

_CHANNEL_OPTIONS: Final = {
    **dict(CHANNEL_OPTIONS),
    # etcd hangs up on clients that ping without a call under way. A watch is a call: where it matters there are pings.
    "grpc.keepalive_permit_without_calls": 0,
    # Also the time that a connection attempt gets, and the store may be further away than the rest of the mesh.
    "grpc.min_reconnect_backoff_ms": 500,
    # Measured with grpcio 1.85: keepalive_timeout_ms alone leaves a frozen peer unnoticed for 60 s, this makes it 15 s.
    "grpc.http2.ping_timeout_ms": 5_000,
}
_UNAVAILABLE: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
)
_CLOSED: Final = "this store object is closed; open a new one"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer(Generic[Stubs]):
    """One endpoint of the store, with the channel to it."""

    endpoint: str
    channel: grpc.aio.Channel
    stubs: Stubs


class Connection(Generic[Stubs]):
    """One channel per endpoint, opened when first needed; stays with an endpoint as long as it answers."""

    def __init__(
        self,
        endpoints: Sequence[str],
        make_stubs: Callable[[grpc.aio.Channel], Stubs],
        runtime: Runtime,
        transport: Transport | None = None,
    ) -> None:
        """`transport`: other than the runtime's, for what is no process of the mesh."""
        self._endpoints = tuple(endpoints)
        self._make_stubs = make_stubs
        self._transport = transport or runtime.transport
        self._clock = runtime.clock
        self._rng = runtime.entropy.generator()
        self._peers: dict[str, Peer[Stubs]] = {}
        self._current = 0
        self.closed = False

    def backoff(self) -> Backoff:
        """A back-off of its own for a caller that tries again."""
        return Backoff(draw=self._rng.random)

    async def call(
        self, send: Callable[[Stubs, float], Awaitable[Answer]], timeout_s: float, *, resend: bool
    ) -> Answer:
        """Answer of `send(stubs, timeout_s)` from an endpoint that is connected.

        With `resend` (calls that may happen twice) a lost connection or a slow endpoint leads to another try within the
        deadline; otherwise to `StoreUnavailable`, because nobody knows whether the call took effect.
        """
        deadline_s = self._clock.now_s() + timeout_s
        backoff = self.backoff()
        while True:
            peer = await self.connected(deadline_s - self._clock.now_s())
            left_s = max(deadline_s - self._clock.now_s(), 0.0)
            share_s = left_s / len(self._endpoints) if resend else left_s
            try:
                with self.failures(peer):
                    return await send(peer.stubs, share_s)
            except StoreUnavailable as failure:
                if not resend:
                    raise StoreUnavailable(
                        f"{failure}; the write may or may not have happened, read first"
                    ) from failure
                pause_s = backoff.next_s()
                if self._clock.now_s() + pause_s >= deadline_s:
                    raise
            await asyncio.sleep(pause_s)

    async def connected(self, timeout_s: float) -> Peer[Stubs]:
        """An endpoint whose channel is ready, trying them in turn. Raises `StoreUnavailable`."""
        backoff = self.backoff()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for _ in self._endpoints:
                        peer = self._peer()
                        if await _ready(peer.channel):
                            return peer
                        self._leave(peer)
                    await asyncio.sleep(backoff.next_s())
        except TimeoutError as error:
            raise StoreUnavailable(
                f"no state store at {', '.join(self._endpoints)} within {timeout_s:.1f} s; is it running?"
            ) from error

    @contextmanager
    def failures(self, peer: Peer[Stubs]) -> Iterator[None]:
        """Turns the failure of a call into an error of our tree; leaves an endpoint that did not answer."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._failure(peer, error) from error
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls, not the tasks that wait for them.
            task = asyncio.current_task()
            if self.closed and (task is None or not task.cancelling()):
                raise StoreUnavailable(_CLOSED) from None
            raise

    def _failure(self, peer: Peer[Stubs], error: grpc.aio.AioRpcError) -> StoreError:
        details = error.details() or error.code().name
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return StoreRefused(f"the state store at {peer.endpoint} says: {details}")
        if error.code() in _UNAVAILABLE:
            self._leave(peer)
            return StoreUnavailable(f"the state store at {peer.endpoint} did not answer: {details}")
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return LeaseLost(f"the state store at {peer.endpoint} says: {details}; grant a new lease")
        if error.code() is grpc.StatusCode.OUT_OF_RANGE:
            return StoreCompacted(f"the state store at {peer.endpoint} says: {details}; list again")
        return StoreError(f"the state store at {peer.endpoint} refused: {details} ({error.code().name})")

    async def close(self) -> None:
        """Cancel what is under way and close every channel."""
        self.closed = True
        for peer in self._peers.values():
            await peer.channel.close()
        self._peers.clear()

    def _peer(self) -> Peer[Stubs]:
        if self.closed:
            raise StoreUnavailable(_CLOSED)
        endpoint = self._endpoints[self._current]
        if endpoint not in self._peers:
            channel = self._transport.channel(endpoint, tuple(_CHANNEL_OPTIONS.items()), (), "store")
            self._peers[endpoint] = Peer(endpoint, channel, self._make_stubs(channel))
        return self._peers[endpoint]

    def _leave(self, peer: Peer[Stubs]) -> None:
        """Go to the next endpoint, unless another call has done so already."""
        if len(self._endpoints) > 1 and self._endpoints[self._current] == peer.endpoint:
            self._current = (self._current + 1) % len(self._endpoints)
            _log.warning("state store: from %s to %s", peer.endpoint, self._endpoints[self._current])


async def _ready(channel: grpc.aio.Channel) -> bool:
    """Wait until a connection attempt has ended."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            return False
        await channel.wait_for_state_change(state)
    return True
