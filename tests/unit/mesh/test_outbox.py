"""What a frontend writes to its peers, as gRPC reads it."""

import asyncio

import pytest

from mesh.errors import PeerUnavailable
from mesh.rpc.outbox import MAX_OUTBOX_MESSAGES, LossyOutbox, Outbox


async def test_messages_come_in_order_and_the_end_ends_whoever_waits() -> None:
    outbox = Outbox[int]("peer")
    outbox.put(1)
    outbox.put(2)
    assert [await anext(outbox), await anext(outbox)] == [1, 2]
    waiting = asyncio.create_task(_read(outbox))
    await asyncio.sleep(0)
    outbox.put(3)
    await asyncio.sleep(0)
    outbox.close()
    assert await waiting == [3]


async def test_a_peer_that_does_not_read_is_said_to_be_away() -> None:
    outbox = Outbox[int]("peer")
    for number in range(MAX_OUTBOX_MESSAGES):
        outbox.put(number)
    with pytest.raises(PeerUnavailable, match="does not read"):
        outbox.put(0)


async def test_a_lossy_one_drops_what_does_not_fit_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    outbox = LossyOutbox[int]("peer", max_messages=2)
    for number in range(3):
        outbox.put(number)
    assert [record.__dict__["peer"] for record in caplog.records] == ["peer"]
    assert [await anext(outbox), await anext(outbox)] == [0, 1]
    outbox.put(3)
    assert await anext(outbox) == 3


async def _read(outbox: Outbox[int]) -> list[int]:
    return [message async for message in outbox]
