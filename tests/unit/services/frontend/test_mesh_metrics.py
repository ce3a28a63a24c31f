"""The metrics of every member on one page, asked for when somebody wants them and not more than once a second."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, Gauge

from mesh.membership import ChangeKind
from mesh.runtime import GrpcTransport, system_runtime
from services.frontend.mesh_metrics import FRESH_S, EngineLoad, MeshMetrics
from tests.unit.services.frontend.fake_member import FakeMember

pytestmark = pytest.mark.live


@dataclass
class Read:
    """The metrics of a mesh as a frontend reads them, at a time that the test sets."""

    now_s: float = 50.0
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        Gauge("vllm:num_own", "Own", ["model_name"], registry=self.registry).labels("m").set(1)
        self.unread = Gauge("penstock_unread", "Missing", registry=self.registry)
        runtime = system_runtime()
        self.metrics = MeshMetrics(
            "frontend", self.registry, self.unread, GrpcTransport(), runtime.threads, lambda: self.now_s
        )

    async def page(self) -> list[str]:
        """Samples that are there a second later."""
        self.now_s += FRESH_S
        return [line for line in (await self.metrics.page()).decode().splitlines() if not line.startswith("#")]


@asynccontextmanager
async def reading(*members: FakeMember) -> AsyncIterator[Read]:
    read = Read()
    async with AsyncExitStack() as running:
        for member in members:
            await running.enter_async_context(member.served())
            read.metrics.on_change(member.change(ChangeKind.JOINED))
        running.push_async_callback(read.metrics.stop)
        yield read


async def test_the_page_has_all_members_and_of_other_names_only_its_own() -> None:
    first, second = FakeMember("w-0", 0.5, 2.0), FakeMember("w-1", 0.1)
    async with reading(first, second, FakeMember("frontend-1", role="frontend")) as read:
        assert await read.page() == [
            "penstock_unread 0.0",
            'vllm:num_own{member_id="frontend",model_name="m"} 1.0',
            'vllm:kv_cache_usage_perc{member_id="w-0",model_name="m"} 0.5',
            'vllm:kv_cache_usage_perc{member_id="w-1",model_name="m"} 0.1',
            'vllm:num_requests_waiting{member_id="w-0",model_name="m"} 2.0',
            'vllm:num_requests_waiting{member_id="w-1",model_name="m"} 0.0',
        ]


async def test_members_are_asked_once_a_second_at_most() -> None:
    worker = FakeMember("w-0")
    async with reading(worker) as read:
        await read.page()
        await read.metrics.page()
        await read.metrics.read()
        assert worker.asked == 1
        await read.page()
        assert worker.asked == 2


async def test_a_member_that_does_not_answer_is_missing_and_counted() -> None:
    former, gone, well = FakeMember("former", is_former=True), FakeMember("gone"), FakeMember("w-0")
    async with reading(former, well) as read:
        gone.address = "127.0.0.1:1"
        read.metrics.on_change(gone.change(ChangeKind.JOINED))
        page = await read.page()
        assert "penstock_unread 2.0" in page
        assert [line for line in page if "kv_cache" in line] == [
            'vllm:kv_cache_usage_perc{member_id="w-0",model_name="m"} 0.0'
        ]


async def test_only_members_that_are_there_are_asked() -> None:
    worker, scheduler = FakeMember("w-0"), FakeMember("s", role="scheduler")
    async with reading(worker, scheduler, FakeMember("frontend", role="frontend")) as read:
        read.metrics.on_change(worker.change(ChangeKind.CHANGED, "2"))
        read.metrics.on_change(worker.change(ChangeKind.LEFT, "1"))
        assert any("kv_cache" in line for line in await read.page()), "another life of it is there"
        read.metrics.on_change(worker.change(ChangeKind.LEFT, "2"))
        assert await read.page() == ["penstock_unread 0.0", 'vllm:num_own{member_id="frontend",model_name="m"} 1.0']
        assert scheduler.asked == 0


async def test_a_member_that_moves_is_asked_where_it_is() -> None:
    worker, next_one = FakeMember("w-0"), FakeMember("w-0", 0.9)
    async with reading(worker) as read:
        await read.page()
        async with reading(next_one):
            read.metrics.on_change(next_one.change(ChangeKind.CHANGED))
            assert any("0.9" in line for line in await read.page())


async def test_the_load_is_that_of_all_instances_of_the_models() -> None:
    members = FakeMember("w-0", 0.5, 2.0), FakeMember("w-1", 0.25, 1.0), FakeMember("x-0", 0.0, 7.0, model="x")
    async with reading(*members) as read:
        seen = await read.metrics.read()
        assert seen.load(["m"]) == EngineLoad(3.0, 0.375)
        assert seen.load(["m", "x"]) == EngineLoad(10.0, 0.25)
        assert seen.load(["y"]) is None
