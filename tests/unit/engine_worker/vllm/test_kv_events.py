"""The event stream over real sockets: order, gaps, replay, closing."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from controlplane.model.instance import KvBlocks
from controlplane.model.prefix_hash import block_hashes
from engine_worker.engines.vllm.block_map import BlockMap

zmq = pytest.importorskip("zmq", reason="pyzmq comes with the vLLM engine")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

from engine_worker.engines.vllm.kv_events import KvEventStream  # noqa: E402

pytestmark = pytest.mark.live

BLOCK = 2


def batch(number: int) -> bytes:
    """The batch that stores one block, of tokens made of its number."""
    event = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [number] * BLOCK,
        "block_size": BLOCK,
        "medium": "GPU",
    }
    return msgspec.msgpack.encode([0.0, [event]])


def change(number: int) -> KvBlocks:
    return KvBlocks(stored=tuple(block_hashes([number] * BLOCK, BLOCK)))


class Publisher:
    """vLLM's side: publishes what it is told to and replays what `kept` holds."""

    def __init__(self) -> None:
        self._context = zmq_asyncio.Context()
        self._events = self._context.socket(zmq.XPUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._events.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self._replay.bind_to_random_port('tcp://127.0.0.1')}"
        self.kept: dict[int, bytes] = {}
        self._server = asyncio.create_task(self._serve_replay())

    async def subscribed(self) -> None:
        await self._events.recv()

    async def publish(self, number: int) -> None:
        await self._events.send_multipart([b"", number.to_bytes(8, "big"), batch(number)])

    async def _serve_replay(self) -> None:
        while True:
            client, _, first = await self._replay.recv_multipart()
            for number in sorted(self.kept):
                if number >= int.from_bytes(first, "big"):
                    await self._replay.send_multipart([client, b"", b"", number.to_bytes(8, "big"), self.kept[number]])
            await self._replay.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._server.cancel()
        self._context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    publisher = Publisher()
    yield publisher
    publisher.close()


@pytest.fixture
async def stream(publisher: Publisher) -> AsyncIterator[KvEventStream]:
    stream = KvEventStream(BlockMap(BLOCK), publisher.endpoint, publisher.replay_endpoint)
    await publisher.subscribed()
    yield stream
    stream.close()


async def test_batches_come_in_order_and_once(publisher: Publisher, stream: KvEventStream) -> None:
    changes = stream.changes()
    for number in (0, 1, 1, 0, 2):
        await publisher.publish(number)
    assert [await anext(changes) for _ in range(3)] == [change(0), change(1), change(2)]
    assert stream.gaps_total == 0


async def test_a_gap_is_replayed(publisher: Publisher, stream: KvEventStream) -> None:
    changes = stream.changes()
    publisher.kept = {number: batch(number) for number in range(5)}
    await publisher.publish(0)
    assert await anext(changes) == change(0)
    await publisher.publish(4)
    assert [await anext(changes) for _ in range(4)] == [change(number) for number in (1, 2, 3, 4)]
    assert stream.gaps_total == 1


async def test_what_cannot_be_replayed_starts_the_index_anew(publisher: Publisher, stream: KvEventStream) -> None:
    changes = stream.changes()
    await publisher.publish(0)
    assert await anext(changes) == change(0)
    publisher.kept = {number: batch(number) for number in (3, 4)}
    await publisher.publish(4)
    assert await anext(changes) == KvBlocks(cleared=True)
    assert [await anext(changes) for _ in range(2)] == [change(3), change(4)]
    await publisher.publish(5)
    assert await anext(changes) == change(5)


async def test_a_missed_beginning_is_a_gap_too(publisher: Publisher, stream: KvEventStream) -> None:
    publisher.kept = {number: batch(number) for number in range(2)}
    await publisher.publish(1)
    changes = stream.changes()
    assert [await anext(changes) for _ in range(2)] == [change(0), change(1)]


async def test_closing_ends_the_stream_for_its_reader(stream: KvEventStream) -> None:
    async def read() -> list[KvBlocks]:
        return [change async for change in stream.changes()]

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    stream.close()
    assert await asyncio.wait_for(reader, 2.0) == []


async def test_a_cancelled_reader_is_cancelled(stream: KvEventStream) -> None:
    reader = asyncio.create_task(anext(stream.changes()))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
