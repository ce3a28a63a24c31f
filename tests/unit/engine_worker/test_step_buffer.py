"""One message per step, and none lost when the reader lags."""

import asyncio

from controlplane.model.request import FinishReason, StepOutput, TokenDelta
from engine_worker.engines.step_buffer import StepBuffer


def delta(request_id: str, offset: int, *token_ids: int, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(request_id, offset, token_ids, finish_reason=finish)


async def test_what_one_turn_of_the_loop_brings_is_one_message() -> None:
    buffer = StepBuffer()
    wakes = [asyncio.Event() for _ in range(3)]

    async def reader_of_one_request(number: int) -> None:
        await wakes[number].wait()
        buffer.add(delta(f"r{number}", 0, number))

    tasks = [asyncio.create_task(reader_of_one_request(number)) for number in range(3)]
    taker = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    for wake in wakes:
        wake.set()
    assert await taker == StepOutput((delta("r0", 0, 0), delta("r1", 0, 1), delta("r2", 0, 2)))
    await asyncio.gather(*tasks)


async def test_a_lagging_reader_gets_joined_deltas() -> None:
    buffer = StepBuffer()
    buffer.add(TokenDelta("a", 5, (1,), cached_tokens=32))
    buffer.add(delta("b", 0, 9))
    buffer.add(delta("a", 6, 2, finish=FinishReason.STOP))
    joined = TokenDelta("a", 5, (1, 2), finish_reason=FinishReason.STOP, cached_tokens=32)
    assert await buffer.take() == StepOutput((joined, delta("b", 0, 9)))


async def test_an_id_used_again_starts_another_message() -> None:
    buffer = StepBuffer()
    buffer.add(delta("a", 0, finish=FinishReason.ABORT))
    buffer.add(delta("a", 0, 7))
    assert await buffer.take() == StepOutput((delta("a", 0, finish=FinishReason.ABORT),))
    assert await buffer.take() == StepOutput((delta("a", 0, 7),))


async def test_a_closed_buffer_is_read_to_its_end() -> None:
    buffer = StepBuffer()
    buffer.add(delta("a", 0, 7))
    buffer.close()
    assert await buffer.take() == StepOutput((delta("a", 0, 7),))
    assert await buffer.take() is None


async def test_closing_wakes_a_waiting_reader() -> None:
    buffer = StepBuffer()
    taker = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    buffer.close()
    assert await taker is None
