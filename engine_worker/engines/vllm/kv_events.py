"""vLLM's stream of KV events, in order and without gaps, as changes in the mesh's block hashes."""

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import zmq.asyncio
from zmq.constants import SocketType

from controlplane.model.instance import KvBlocks
from engine_worker.engines.vllm.block_map import BlockMap, KvEventBatch

log = logging.getLogger(__name__)

BUFFERED_BATCHES = 10_000
"""Batches that the engine keeps for replay, and that may wait here before the stream gets a gap."""
_REPLAY_DEADLINE_S = 2.0
_END_OF_REPLAY = (1 << 64) - 1


class KvEventStream:
    """Subscribes to the engine's events; a gap is filled from the engine's replay buffer.

    Frames of a message: topic, sequence number (8 bytes, big endian, from 0), batch (MessagePack).
    """

    def __init__(self, block_map: BlockMap, endpoint: str, replay_endpoint: str, *, catches_up: bool = False) -> None:
        """An endpoint with a * is listened on, for an engine that connects. Without `replay_endpoint` a gap has
        everything forgotten. `catches_up`: the engine has been running, so ask first for what it said before."""
        self._block_map = block_map
        self._replay_endpoint = replay_endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(SocketType.SUB)
        self._socket.set_hwm(BUFFERED_BATCHES)
        self._socket.subscribe(b"")
        if "*" in endpoint:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)
        self._catches_up = catches_up and bool(replay_endpoint)
        self._decoder = msgspec.msgpack.Decoder(KvEventBatch)
        self._next_sequence = 0
        self._is_closed = False
        self.gaps_total = 0

    async def changes(self) -> AsyncIterator[KvBlocks]:
        """One message per batch that changed anything; ends when the stream is closed."""
        if self._catches_up:
            for number, payload in await self._replay(0, _END_OF_REPLAY):
                change = self._apply(number, payload)
                if change is not None:
                    yield change
        while not self._is_closed:
            try:
                sequence, payload = _message(await self._socket.recv_multipart())
            except asyncio.CancelledError:
                # Closing a socket cancels whoever waits for it, as if the task itself had been cancelled.
                if self._is_closed:
                    return
                raise
            if sequence < self._next_sequence:
                continue
            if sequence > self._next_sequence:
                async for replayed in self._fill_gap(sequence):
                    yield replayed
            change = self._apply(sequence, payload)
            if change is not None:
                yield change

    def close(self) -> None:
        """End `changes` and close the sockets without waiting for messages under way."""
        self._is_closed = True
        self._context.destroy(linger=0)

    async def _fill_gap(self, sequence: int) -> AsyncIterator[KvBlocks]:
        self.gaps_total += 1
        missing = sequence - self._next_sequence
        replayed = await self._replay(self._next_sequence, sequence)
        if len(replayed) == missing:
            log.warning("gap in the engine's KV events, replayed", extra={"batches": missing})
        else:
            log.error("gap in the engine's KV events: the prefix index starts anew", extra={"batches": missing})
            self._block_map.clear()
            yield KvBlocks(cleared=True)
        for number, payload in replayed:
            change = self._apply(number, payload)
            if change is not None:
                yield change

    def _apply(self, sequence: int, payload: bytes) -> KvBlocks | None:
        self._next_sequence = sequence + 1
        return self._block_map.apply(self._decoder.decode(payload).events)

    async def _replay(self, first: int, end: int) -> list[tuple[int, bytes]]:
        """The batches from `first` up to `end` that the engine still has, in order; fewer in doubt."""
        batches: list[tuple[int, bytes]] = []
        if not self._replay_endpoint:
            return batches
        socket = self._context.socket(SocketType.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            async with asyncio.timeout(_REPLAY_DEADLINE_S):
                while True:
                    _, *frames = await socket.recv_multipart()
                    sequence, payload = _message(frames)
                    if sequence == _END_OF_REPLAY:
                        return batches
                    if sequence < end:
                        batches.append((sequence, payload))
        except TimeoutError:
            log.warning("the engine did not replay its KV events in time", extra={"deadline_s": _REPLAY_DEADLINE_S})
            return batches
        finally:
            socket.close(linger=0)


def _message(frames: list[bytes]) -> tuple[int, bytes]:
    _topic, sequence, payload = frames
    return int.from_bytes(sequence, "big"), payload
