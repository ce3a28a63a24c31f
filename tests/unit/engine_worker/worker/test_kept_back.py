"""Requests that wait at the worker for a prefix, as their frontend sees it."""

from collections.abc import AsyncIterator, Callable

import pytest

from controlplane.model.pull_totals import PullTotals
from controlplane.model.request import EngineRequest, PrefixSource
from controlplane.protocols.prefix_pull.target import PullFollowed, PullOrdered
from mesh.errors import QueueFull
from penstock.v1 import request_pb2
from tests.unit.engine_worker.worker.running_worker import SETTINGS, FrontendStream, RunningWorker, running_worker

pytestmark = pytest.mark.live


class Pulls:
    """Keeps requests back until the test lets them go."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], None]] = {}
        self.begun: list[PullOrdered | PullFollowed] = []
        self.brought: set[str] = set()
        """Requests whose prefix is being pulled for another one."""
        self.totals = PullTotals(pulled=2, tokens=64)

    def __len__(self) -> int:
        return len(self.waiting)

    def awaited(self, request: EngineRequest, source: PrefixSource | None) -> PullOrdered | PullFollowed | None:
        if source is not None:
            return PullOrdered(request.request_id, source.instance_id, 0, source.tokens, 0.0)
        return PullFollowed(request.request_id, "pull") if request.request_id in self.brought else None

    def begin(self, request: EngineRequest, awaited: PullOrdered | PullFollowed, submit: Callable[[], None]) -> None:
        self.begun.append(awaited)
        self.waiting[request.request_id] = submit

    def withdraw(self, request_id: str) -> bool:
        return self.waiting.pop(request_id, None) is not None

    def come(self, request_id: str) -> None:
        self.waiting.pop(request_id)()


class World:
    def __init__(self, worker: RunningWorker, stream: FrontendStream) -> None:
        self.worker, self.stream, self.pulls = worker, stream, Pulls()
        worker.instance.pulls = self.pulls

    async def generate(self, request_id: str, **fields: object) -> None:
        prefix = request_pb2.PrefixSource(instance_id="other", tokens=32)
        await self.stream.generate(request_id, prefix=prefix, **fields)
        await self.worker.until(lambda: request_id in self.pulls.waiting)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running_worker() as worker:
        yield World(worker, await worker.connect())


async def test_the_engine_gets_it_when_its_prefix_is_there(world: World) -> None:
    await world.generate("a")
    assert world.pulls.begun == [PullOrdered("a", "other", 0, 32, 0.0)]
    assert "a" not in world.worker.engine.requests
    assert world.worker.instance.load().queued_requests == 1, "it is load all the same"
    assert world.worker.instance.load().pulls == world.pulls.totals
    world.pulls.come("a")
    world.worker.engine.step(finish={"a"})
    delta = await world.stream.only_delta()
    assert (delta.request_id, list(delta.token_ids)) == ("a", [100])


async def test_a_request_that_names_no_prefix_does_not_wait(world: World) -> None:
    await world.stream.generate("a")
    await world.worker.until(lambda: "a" in world.worker.engine.requests)
    assert not world.pulls.begun


async def test_a_request_whose_prefix_is_pulled_for_another_one_waits_with_it(world: World) -> None:
    world.pulls.brought.add("a")
    await world.stream.generate("a")
    await world.worker.until(lambda: "a" in world.pulls.waiting)
    assert world.pulls.begun == [PullFollowed("a", "pull")]
    assert "a" not in world.worker.engine.requests
    world.pulls.come("a")
    assert "a" in world.worker.engine.requests


async def test_an_abort_ends_it_and_the_engine_never_hears_of_it(world: World) -> None:
    await world.generate("a")
    await world.stream.abort("a")
    delta = await world.stream.only_delta()
    assert delta.finish_reason == request_pb2.FINISH_REASON_ABORT
    assert not world.worker.engine.aborted
    assert not world.pulls.waiting
    assert not len(world.worker.instance.table)


async def test_a_deadline_ends_it(world: World) -> None:
    await world.generate("a", deadline_ms=1_000)
    world.worker.clock.now_s += 1.5
    world.worker.instance.tick()
    delta = await world.stream.only_delta()
    assert delta.error.code == request_pb2.ERROR_CODE_DEADLINE
    assert not world.pulls.waiting
    assert not len(world.worker.instance.table)


async def test_a_stream_that_ends_takes_it_with_it(world: World) -> None:
    await world.generate("a")
    world.stream.call.cancel()
    await world.worker.until(lambda: not len(world.worker.instance.table))
    assert not world.pulls.waiting


async def test_what_the_engine_then_refuses_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.generate("a")

    def full(request: EngineRequest) -> None:
        raise QueueFull("the queue is full")

    monkeypatch.setattr(world.worker.engine, "submit", full)
    world.pulls.come("a")
    delta = await world.stream.only_delta()
    assert delta.error.code == request_pb2.ERROR_CODE_UNAVAILABLE
    assert not len(world.worker.instance.table)


async def test_an_engine_that_waits_with_it_does_not_hang(world: World) -> None:
    await world.generate("a")
    world.worker.instance.tick()
    world.worker.clock.now_s += SETTINGS.hang_s + 1.0
    world.worker.instance.tick()
    assert not world.worker.instance.hung
    world.pulls.come("a")
    world.worker.clock.now_s += SETTINGS.hang_s + 1.0
    world.worker.instance.tick()
    assert world.worker.instance.hung


async def test_where_nothing_can_be_pulled_the_engine_gets_it_at_once(world: World) -> None:
    world.worker.instance.pulls = None
    prefix = request_pb2.PrefixSource(instance_id="other", tokens=32)
    await world.stream.generate("a", prefix=prefix)
    await world.worker.until(lambda: "a" in world.worker.engine.requests)
