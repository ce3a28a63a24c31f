"""The puller's side of one transfer: post receives, grant them, put blocks where they belong."""

import asyncio
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from engine_worker.kv.connection import Connection
from engine_worker.kv.memory import Buffer, KvMemory
from engine_worker.kv.messages import Cancel, Failed, Grant, Pull
from engine_worker.kv.plan import Message, Run, plan_messages
from engine_worker.kv.staging import StagingRing, place
from mesh.errors import KvBlockCorrupt, KvTransferFailed, KvTransferRefused, PenstockError
from mesh.invariants import invariants


class _Receiving:
    __slots__ = ("buffer", "future", "is_staged", "message")

    def __init__(self, future: asyncio.Future[None], buffer: Buffer, message: Message, is_staged: bool) -> None:
        self.future = future
        self.buffer = buffer
        self.message = message
        self.is_staged = is_staged


class RunningPull:
    """The puller's side of one transfer. When `run` returns or raises, nothing touches the target blocks any more."""

    def __init__(
        self, connection: Connection, request: Pull, runs: Sequence[Run], memory: KvMemory, grace_s: float
    ) -> None:
        """`request` is sent by `run`, which fills in how many messages are granted. `grace_s` is how long a source that
        was told to stop may take to answer before the connection is cut."""
        self.request = request
        self.messages = 0
        """Received so far."""
        self._connection = connection
        self._memory = memory
        self._grace_s = grace_s
        self._messages = plan_messages(
            [(run.target_block, run.blocks) for run in runs], memory.layout.region_block_bytes, request.packing
        )
        self._is_asked = False
        self._is_cancelled = False
        self._posted = 0
        self._granted = 0
        self._receiving: deque[_Receiving] = deque()
        self._verdict: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
        """The source's last word; an error if it gave up."""
        self._stopped: Exception | None = None
        """Why this side wants no more."""
        self._cutting: asyncio.TimerHandle | None = None
        self._digests: list[int] = []
        self._source_digests: list[int] = []

    async def run(self, ring: StagingRing, window_messages: int) -> None:
        """Pull it all. Raises `KvTransferRefused`, `KvTransferFailed`, `PeerUnavailable`, `KvBlockCorrupt`, what
        `stop` was given, or what the engine's memory raised."""
        await self._memory.ready()
        if self._stopped is not None:
            raise self._stopped
        self._is_asked = True
        self._fill(ring, window_messages)
        self._granted = self._posted
        self._connection.send(replace(self.request, granted=self._granted))
        while self._receiving:
            receiving = self._receiving[0]
            await asyncio.wait((receiving.future,))
            self._receiving.popleft()
            await self._received(receiving)
            if not self._is_failing():
                self._fill(ring, window_messages)
                self._grant(window_messages)
        verdict = await self._verdict
        if self._cutting is not None:
            self._cutting.cancel()
        if isinstance(verdict, KvTransferRefused | KvTransferFailed):
            raise verdict
        if self._stopped is not None:
            raise self._stopped
        if verdict is not None:
            raise verdict
        self._compare_digests()

    def stop(self, error: Exception) -> None:
        """Want no more: `run` raises `error`. If the source does not put the transfer to rest within the grace,
        the connection is cut."""
        if self._stopped is not None:
            return
        self._stopped = error
        if not self._is_asked:
            return
        self._cancel()
        reason = f"a transfer that was stopped ({error}) came to no rest in {self._grace_s:g} s"
        self._cutting = asyncio.get_running_loop().call_later(self._grace_s, self._connection.cut, reason)

    def done(self) -> None:
        """The source has sent all, or has stopped as it was asked to."""
        self._decide(None)

    def failed(self, answer: Failed) -> None:
        """The source gave up: `run` raises the reason, unless this side had cancelled the transfer."""
        story = f"{self._connection.peer_name} gives no blocks of {self.request.export_id!r}: {answer.reason}"
        match answer.kind:
            case "cancelled":
                self._decide(None)
            case "refused":
                self._decide(KvTransferRefused(story))
                self._cancel()
            case "failed":
                self._decide(KvTransferFailed(story))
                self._cancel()

    def add_digests(self, values: Sequence[int]) -> None:
        """Checksums of the next messages."""
        self._source_digests.extend(values)

    def lost(self) -> None:
        """The connection was cut: `run` raises `PeerUnavailable`."""
        self._decide(self._connection.lost())

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert 0 <= self._granted <= self._posted, "nothing is granted that nobody would receive"
        assert self.messages + len(self._receiving) <= self._posted, "what comes was asked for"
        assert len(self._digests) <= self.messages, "a checksum for each message, where there are any"
        assert not self._is_cancelled or self._granted == self._posted, "what was posted is granted when it is stopped"

    def _cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._grant_posted()  # what is posted must be granted, or it waits for ever
            self._connection.send(Cancel(self.request.transfer))

    def _decide(self, verdict: PenstockError | None) -> None:
        if not self._verdict.done():
            self._verdict.set_result(verdict)

    def _is_failing(self) -> bool:
        return self._stopped is not None or (self._verdict.done() and self._verdict.result() is not None)

    def _fill(self, ring: StagingRing, window_messages: int) -> None:
        """Post receives until the window is full."""
        while len(self._receiving) < window_messages:
            message = next(self._messages, None)
            if message is None:
                return
            self._post(message, ring)

    def _post(self, message: Message, ring: StagingRing) -> None:
        buffer = place(self._memory, message)
        is_staged = buffer is None
        if is_staged:
            buffer = ring.buffer(self._posted, message.nbytes)
        future = self._connection.receive_data(self.request.transfer, buffer)
        self._receiving.append(_Receiving(future, buffer, message, is_staged))
        self._posted += 1

    def _grant(self, window_messages: int) -> None:
        """Not each time: a control message costs as much as a small message of blocks."""
        is_last = len(self._receiving) < window_messages
        if is_last or self._posted - self._granted >= (window_messages + 1) // 2:
            self._grant_posted()

    def _grant_posted(self) -> None:
        if self._posted > self._granted:
            self._granted = self._posted
            self._connection.send(Grant(self.request.transfer, self._granted))

    async def _received(self, receiving: _Receiving) -> None:
        if receiving.future.exception() is not None:
            self._connection.cut(str(receiving.future.exception()))
            return
        if self._is_failing():
            return
        self.messages += 1
        try:
            if self.request.checksums:
                self._digests.append(xxh3_64_intdigest(self._memory.host_bytes(receiving.buffer)))
            if receiving.is_staged:
                await self._memory.scatter(receiving.message.blocks, receiving.buffer)
        except Exception as error:  # noqa: BLE001  the caller gets it when the transfer has come to rest
            self.stop(error)

    def _compare_digests(self) -> None:
        if not self.request.checksums:
            return
        for number, (here, there) in enumerate(zip(self._digests, self._source_digests, strict=True)):
            if here != there:
                raise KvBlockCorrupt(
                    f"message {number} of {self.request.export_id!r} from {self._connection.peer_name} has xxh3 "
                    f"{here:016x} here and {there:016x} there: were its blocks written to meanwhile?"
                )
