"""Whose migration may begin."""

import asyncio
from contextlib import AsyncExitStack

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.coordinator.lanes import Lanes
from engine_worker.request_table import TrackedRequest


def tracked(name: str, *, decodes: bool = True) -> TrackedRequest:
    request = EngineRequest(name, (1, 2, 3), SamplingParams(max_tokens=9))
    return TrackedRequest(request, 1, "f", 0.0, None, [], started=decodes)


class Entrant:
    """An order on its way through its lane."""

    def __init__(self, lanes: Lanes, of: TrackedRequest) -> None:
        self.lanes = lanes
        self.of = of
        self.is_here: bool | None = None
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._go())

    async def _go(self) -> None:
        async with self.lanes.enter(self.of) as is_here:
            self.is_here = is_here
            await self.leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def finish(*entrants: Entrant) -> None:
    for entrant in entrants:
        entrant.leave.set()
    await asyncio.gather(*(entrant.task for entrant in entrants))


async def test_first_come_first_served_and_never_more_than_there_are_places() -> None:
    lanes = Lanes(2, lambda _: True)
    entrants = [Entrant(lanes, tracked(name)) for name in "abcd"]
    await settle()
    assert [each.is_here for each in entrants] == [True, True, None, None]
    await finish(entrants[1])
    await settle()
    assert [each.is_here for each in entrants] == [True, True, True, None]
    await finish(*entrants)
    assert len(lanes) == 0


async def test_long_prefills_keep_nobody_waiting_who_decodes() -> None:
    lanes = Lanes(1, lambda _: True)
    long, queued = (Entrant(lanes, tracked(name, decodes=False)) for name in ("long", "queued"))
    await settle()
    decoding = Entrant(lanes, tracked("decoding"))
    await settle()
    assert [long.is_here, queued.is_here, decoding.is_here] == [True, None, True]
    await finish(decoding)
    queued.of.started = True
    lanes.look()
    await settle()
    assert queued.is_here, "its prompt was computed before its turn came: it goes by the other lane"
    await finish(long, queued)


async def test_a_request_that_ended_needs_no_place() -> None:
    gone: set[str] = set()
    lanes = Lanes(1, lambda each: each.request.request_id not in gone)
    first, second = Entrant(lanes, tracked("first")), Entrant(lanes, tracked("second"))
    await settle()
    gone.add("second")
    lanes.look()
    await settle()
    assert second.is_here is False
    await finish(second)
    third = Entrant(lanes, tracked("third"))
    await settle()
    assert third.is_here is None, "what ended gave back no place that it never had"
    await finish(first)
    await settle()
    assert third.is_here
    await finish(third)


async def test_an_order_that_is_taken_back_leaves_the_queue_or_its_place() -> None:
    lanes = Lanes(1, lambda _: True)
    async with AsyncExitStack() as stack:
        first, second, third = (Entrant(lanes, tracked(name)) for name in "abc")
        stack.callback(third.task.cancel)
        await settle()
        second.task.cancel()
        first.task.cancel()
        await settle()
        assert third.is_here
        assert len(lanes) == 0
