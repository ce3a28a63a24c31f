"""The requests of a disturbed mesh: so many at a time, and new ones whether or not they are answered."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from services.cli.chaos.streams import Client, CompletionRequest, Question, Stream
from services.cli.chaos.traffic import Load, Traffic
from services.cli.chaos.verdict import Answer
from services.cli.replay.pool import parse_endpoint

pytestmark = pytest.mark.live

QUESTION = Question(CompletionRequest(parse_endpoint("http://127.0.0.1:1"), {}), Answer("", 0, finished=True))


class Slow:
    """Answers nothing until it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.requests = set[bytes]()
        self.at_once = 0
        self.go = asyncio.Event()

    async def ask(self, request: bytes, stream: Stream, deadline_s: float) -> None:
        self.asked += 1
        self.requests.add(request)
        self.at_once += 1
        await self.go.wait()
        await asyncio.sleep(0)
        self.at_once -= 1


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():  # noqa: ASYNC110  nothing here sets an event
            await asyncio.sleep(0.001)


async def test_slow_answers_make_no_new_request_wait() -> None:
    client = Slow()
    traffic = Traffic(cast(Client, client), Load((), (QUESTION,), rate=1000.0, deadline_s=1.0))
    traffic.start_new()
    await until(lambda: client.at_once >= 5)
    client.go.set()
    await traffic.end_new()
    assert traffic.new.requests == client.asked >= 5


async def test_streams_are_asked_for_again_until_it_is_over() -> None:
    client = Slow()
    client.go.set()
    traffic = Traffic(cast(Client, client), Load((QUESTION, QUESTION), (), rate=0.0, deadline_s=1.0))
    traffic.start_streams()
    traffic.start_new()
    await until(lambda: traffic.streams.requests >= 2)
    await traffic.end_streams()
    await traffic.end_new()
    assert client.at_once == 0
    assert traffic.streams.requests == client.asked >= 2
    assert traffic.new.requests == 0


async def test_prefixes_are_fresh_again_after_so_many_requests() -> None:
    for fresh_every in (0, 4):
        client = Slow()
        client.go.set()
        load = Load((), (QUESTION,), rate=1000.0, deadline_s=1.0, fresh_every=fresh_every)
        traffic = Traffic(cast(Client, client), load)
        traffic.start_new()
        await until(lambda client=client: client.asked > 9)
        await traffic.end_new()
        assert len(client.requests) == (-(-client.asked // fresh_every) if fresh_every else 1)


async def test_what_is_given_up_ends() -> None:
    client = Slow()
    traffic = Traffic(cast(Client, client), Load((QUESTION,), (QUESTION,), rate=100.0, deadline_s=1.0))
    traffic.start_streams()
    traffic.start_new()
    await until(lambda: client.at_once >= 2)
    await traffic.cancel()
    await traffic.end_new()
    assert traffic.streams.requests == traffic.new.requests == 0
