"""The source's side of one transfer: send blocks, as many messages as were granted."""

import asyncio
from collections import deque

import numpy as np
from xxhash import xxh3_64_intdigest

from engine_worker.kv.connection import Connection
from engine_worker.kv.memory import Buffer, KvMemory
from engine_worker.kv.messages import MAX_DIGESTS, Digests, Done, Failed, Pull
from engine_worker.kv.plan import Message, plan_messages
from engine_worker.kv.regions import part_block_bytes, part_refusal
from engine_worker.kv.staging import StagingRing, place

_VOID = np.zeros(1, np.uint8)
"""Stands for a message that was granted and will not be sent."""


def request_refusal(request: Pull, memory: KvMemory, message_bytes: int) -> str:
    """Why no memory like this one, sent in messages of so many bytes, can serve a pull; empty if it can."""
    packing, layout = request.packing, memory.layout
    if refusal := part_refusal(layout, request.parts):
        return refusal
    largest = max(part_block_bytes(layout, request.parts) or layout.region_block_bytes)
    if not max(largest, packing.gathered_bytes) <= packing.message_bytes <= message_bytes:
        return (
            f"messages of {packing.message_bytes} bytes are asked for and {message_bytes} is the largest here: give "
            "all workers one message_bytes"
        )
    if not 1 <= packing.direct_bytes <= packing.gathered_bytes:
        return (
            f"runs of less than {packing.direct_bytes} bytes are asked for in messages of {packing.gathered_bytes}; "
            "direct_bytes is from 1 to gathered_bytes"
        )
    if sum(count for _, count in request.runs) > memory.blocks:
        return f"more blocks are asked for than there are ({memory.blocks})"
    return ""


class ServedPull:
    """The source's side of one transfer: sends the blocks that a `Pull` asks for, as many messages as it has
    granted."""

    def __init__(self, connection: Connection, request: Pull, memory: KvMemory) -> None:
        self.request = request
        self.at_rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once no memory of the engine is touched any more."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once nothing more is to come from the puller about it."""
        self._connection = connection
        self._memory = memory
        self._granted = request.granted
        self._sent = 0
        self._sending: deque[asyncio.Future[None]] = deque()
        self._digests: list[int] = []
        self._failure: Failed | None = None
        self._is_running = False
        self._is_done = False
        self._has_given_up = False
        self._changed = asyncio.Event()

    def grant(self, granted: int) -> None:
        """The puller has posted receives for `granted` messages in all."""
        self._granted = max(self._granted, granted)
        self._changed.set()
        if self._has_given_up:
            self._send_voids()

    def refuse(self, reason: str) -> None:
        """Answer that nothing will be sent, and why."""
        self._stop(Failed(self.request.transfer, "refused", reason))

    def fail(self, reason: str) -> None:
        """Stop in the middle and tell the puller why; messages that it has granted are sent empty, so that its receives
        end."""
        self._stop(Failed(self.request.transfer, "failed", reason))

    def cancel(self) -> None:
        """The puller wants no more, or has heard that it gets no more: its last message about the transfer."""
        self._stop(Failed(self.request.transfer, "cancelled"))
        _finish(self.closed)

    async def run(self, ring: StagingRing, window_messages: int) -> None:
        """Send it all, or what was granted until it was stopped. Returns when it is at rest."""
        if self._failure is not None:
            return
        self._is_running = True
        try:
            await self._memory.ready()
            if self.request.parts:
                self._memory = self._memory.part(self.request.parts)
            await self._send_blocks(ring, window_messages)
        except ConnectionError as error:
            self.fail(str(error))
        except Exception as error:  # noqa: BLE001  whatever the engine's memory raises, the puller must hear of it
            self.fail(f"the source cannot read its blocks: {error}")
        if self._failure is None:
            self._is_done = True
            self._connection.send(Done(self.request.transfer))
        else:
            self._give_up(self._failure)
        if self._sending:
            await asyncio.wait(self._sending)
        _finish(self.at_rest)
        if self._is_done:
            _finish(self.closed)

    def _stop(self, failure: Failed) -> None:
        if self._failure is not None or self._is_done:
            return
        self._failure = failure
        self._changed.set()
        if not self._is_running:
            self._give_up(failure)
            _finish(self.at_rest)

    async def _send_blocks(self, ring: StagingRing, window_messages: int) -> None:
        layout, request = self._memory.layout, self.request
        for message in plan_messages(request.runs, layout.region_block_bytes, request.packing):
            while self._sent >= self._granted and self._failure is None:
                self._changed.clear()
                await self._changed.wait()
            if len(self._sending) >= window_messages:
                await self._sending.popleft()
            if self._failure is not None:
                return
            buffer = await self._content(message, ring)
            if request.checksums:
                self._add_digest(xxh3_64_intdigest(self._memory.host_bytes(buffer)))
            self._sending.append(self._connection.send_data(request.transfer, buffer))
            self._sent += 1
        self._send_digests()

    async def _content(self, message: Message, ring: StagingRing) -> Buffer:
        buffer = None if self.request.is_copied else place(self._memory, message)
        if buffer is None:
            buffer = ring.buffer(self._sent, message.nbytes)
            await self._memory.gather(message.blocks, buffer)
        return buffer

    def _add_digest(self, digest: int) -> None:
        self._digests.append(digest)
        if len(self._digests) == MAX_DIGESTS:
            self._send_digests()

    def _send_digests(self) -> None:
        if self._digests:
            self._connection.send(Digests(self.request.transfer, tuple(self._digests)))
            self._digests.clear()

    def _give_up(self, failure: Failed) -> None:
        self._has_given_up = True
        self._connection.send(failure)
        self._send_voids()

    def _send_voids(self) -> None:
        for _ in range(self._sent, self._granted):
            self._sending.append(self._connection.send_data(self.request.transfer, _VOID))
        self._sent = self._granted


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
