"""Frontends with several cascade routers, some of which do not answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from mesh.errors import JudgeUnavailable
from mesh.membership import ChangeKind, MemberChange
from mesh.runtime import GrpcTransport
from penstock.v1 import cascade_pb2
from services.frontend.cascade.judging import JudgeClient
from tests.unit.services.frontend.fakes import FakeRouter

pytestmark = pytest.mark.live

UNTOLD = Counter("untold", "Untold", ["cascade"], registry=CollectorRegistry())


def untold() -> float:
    (counter,) = UNTOLD.collect()
    return sum(sample.value for sample in counter.samples if sample.name == "untold_total")


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[JudgeClient, FakeRouter, FakeRouter]]:
    """A client of both, which asks the first one first."""
    client = JudgeClient(5.0, GrpcTransport(), UNTOLD)
    UNTOLD.clear()
    routers = FakeRouter(lambda _: 10.0, "cascade-0"), FakeRouter(lambda _: 20.0, "cascade-1")
    try:
        for router in routers:
            await router.start()
            client.on_change(MemberChange(ChangeKind.JOINED, router.member))
        yield client, *routers
    finally:
        await client.stop()
        for router in routers:
            await router.stop()


def request() -> cascade_pb2.JudgeRequest:
    return cascade_pb2.JudgeRequest(request_id="r", cascade="both", first_answer=True)


async def test_routers_are_asked_in_turn() -> None:
    async with two_routers() as (client, _, _):
        assert [(await client.judge(request(), None)).score for _ in range(4)] == [10.0, 20.0, 10.0, 20.0]


async def test_while_a_router_is_dead_the_other_one_judges() -> None:
    async with two_routers() as (client, first, _):
        await client.judge(request(), None)
        await first.stop()
        assert [(await client.judge(request(), None)).score for _ in range(4)] == [20.0] * 4


async def test_no_router_left_is_said_of_each() -> None:
    async with two_routers() as (client, first, second):
        await first.stop()
        await second.stop()
        with pytest.raises(JudgeUnavailable, match=r"cascade-0: UNAVAILABLE.*; cascade-1: UNAVAILABLE"):
            await client.judge(request(), None)
        assert untold() == 1, "it is in nobody's samples"
        later = request()
        later.first_answer = False
        with pytest.raises(JudgeUnavailable):
            await client.judge(later, None)
        assert untold() == 1, "the client's request was counted before"


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        (grpc.StatusCode.NOT_FOUND, True),
        (grpc.StatusCode.FAILED_PRECONDITION, True),
    ],
)
async def test_a_router_that_cannot_take_it_leaves_it_to_the_next_and_the_request_counts_once(
    code: grpc.StatusCode, counts: bool
) -> None:
    async with two_routers() as (client, first, second):
        first.refuses = code
        assert (await client.judge(request(), None)).score == 20.0
        assert [each.first_answer for each in first.judged + second.judged] == [True, counts]


@pytest.mark.parametrize("refusal", [None, grpc.StatusCode.INTERNAL])
async def test_where_the_judges_gave_no_score_no_other_router_asks_them_again(refusal: grpc.StatusCode | None) -> None:
    async with two_routers() as (client, first, second):
        first.score, first.refuses = lambda _: None, refusal
        with pytest.raises(JudgeUnavailable, match="cascade-0"):
            await client.judge(request(), None)
        assert second.judged == []
        assert untold() == (refusal is not None), "a router whose judges gave no score has counted it"


async def test_all_routers_together_have_the_time_that_is_left() -> None:
    async with two_routers() as (client, first, second):
        first.waits = asyncio.Event()
        with pytest.raises(JudgeUnavailable, match="DEADLINE_EXCEEDED"):
            await asyncio.wait_for(client.judge(request(), 0.1), 3.0)
        assert (second.judged, untold()) == ([], 0)


async def test_a_router_that_leaves_finishes_what_it_judges() -> None:
    async with two_routers() as (client, first, _):
        first.waits = asyncio.Event()
        judging = asyncio.create_task(client.judge(request(), None))
        async with asyncio.timeout(5.0):
            while not first.judged:  # noqa: ASYNC110 - a server has no event
                await asyncio.sleep(0.001)
        client.on_change(MemberChange(ChangeKind.LEFT, first.member))
        assert (await client.judge(request(), None)).score == 20.0
        first.waits.set()
        assert (await judging).score == 10.0
