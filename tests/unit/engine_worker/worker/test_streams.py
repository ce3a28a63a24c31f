import asyncio

from engine_worker import wire
from engine_worker.streams import OutputStream
from penstock.v1 import worker_pb2

MESSAGE = wire.hello_message("instance", "incarnation")


def make_stream(max_messages: int = 3, max_bytes: int = 1000) -> OutputStream:
    return OutputStream(1, "frontend-0", max_messages=max_messages, max_bytes=max_bytes)


async def test_messages_come_out_in_order_and_then_the_end() -> None:
    stream = make_stream()
    messages = [wire.hello_message(str(number), "") for number in range(3)]
    for message in messages:
        assert stream.put(message) == message.ByteSize()
    stream.close()
    assert [await stream.take() for _ in range(4)] == [*messages, None]


async def test_a_reader_waits_for_the_next_message() -> None:
    stream = make_stream()
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert not taking.done()
    stream.put(MESSAGE)
    assert await taking == MESSAGE


async def test_close_ends_a_waiting_reader() -> None:
    stream = make_stream()
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.close()
    assert await taking is None


async def test_one_message_too_many_cuts_the_stream() -> None:
    stream = make_stream(max_messages=2)
    stream.put(MESSAGE)
    stream.put(MESSAGE)
    assert not stream.is_cut
    stream.put(MESSAGE)
    assert stream.is_cut
    assert "frontend frontend-0 does not read: 3 steps" in stream.cut_reason.result()


async def test_one_byte_too_many_cuts_the_stream() -> None:
    stream = make_stream(max_messages=100, max_bytes=2 * MESSAGE.ByteSize())
    stream.put(MESSAGE)
    stream.put(MESSAGE)
    assert not stream.is_cut
    stream.put(worker_pb2.WorkerMessage(hello=worker_pb2.WorkerHello(instance_id="x")))
    assert stream.is_cut


async def test_what_was_read_counts_no_more() -> None:
    stream = make_stream(max_messages=1)
    for _ in range(10):
        stream.put(MESSAGE)
        await stream.take()
    assert not stream.is_cut
