"""The planner's stages: made once lengths are there, made again when instances change, taken away when switched off."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.planner.metrics import PlannerMetrics
from controlplane.planner.stages import manager as desk_module
from controlplane.planner.stages.making import DERIVED, LengthStatistics, quality_for
from controlplane.planner.stages.manager import StagePlanManager
from controlplane.planner.stages.service import StagePlannerService
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.stage_partition import PartitionMethod
from controlplane.policies.stages.record import (
    BOUNDARY_PREFIX,
    LAYOUT_PREFIX,
    STAGES_KEY,
    BoundaryRecord,
    boundary_key,
)
from mesh.announcement import Announcement
from mesh.errors import StoreError
from mesh.membership import Directory, Member
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, SystemEntropy, system_runtime
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from mesh.tasks import TaskSet
from penstock.v1 import stages_pb2, stages_pb2_grpc
from tests.still_clock import StillClock
from tests.unit.mesh.leading import Leading
from tests.unit.simulator.cascade.instance_profiles import profile_of

pytestmark = pytest.mark.live

WAIT_S = 10.0
LENGTHS = tuple((50 + 37 * number % 3000, 20 + 11 * number % 500) for number in range(200))


class Bench:
    """A planner with its store; workers are announcements, what they tell is `told`."""

    def __init__(self, host: StoreHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = EmbeddedStore(host)
        self.directory = Directory(self.store)
        self.clock = StillClock(1000.0)
        self.runtime = replace(system_runtime(), clock=self.clock)
        self.told = LengthStatistics((), 0.0, 0.0)
        self.tasks, self.errors = TaskSet("test"), []
        self.announcements: dict[str, Announcement] = {}
        self.registry = CollectorRegistry()
        metrics = PlannerMetrics(self.registry)
        self.manager = StagePlanManager(self.store, self.directory, "planner", Leading(), metrics, self.runtime)
        self.server = RpcServer(GrpcTransport())
        self.stub: Any = None

        async def collect(_transport: object, workers: Any) -> LengthStatistics:
            return self.told

        monkeypatch.setattr(desk_module, "collect", collect)
        monkeypatch.setattr(desk_module, "CHECK_S", 0.01)

    async def start(self) -> None:
        await self.directory.start()
        self.manager.start(self.tasks, self.errors.append)
        self.server.add(
            stages_pb2_grpc.add_StagePlannerServicer_to_server,
            StagePlannerService(self.manager),
            "penstock.v1.StagePlanner",
        )
        await self.server.start()
        self.channel = open_channel(GrpcTransport(), self.server.address)
        self.stub = stages_pb2_grpc.StagePlannerStub(self.channel)  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        await self.channel.close()
        for announcement in self.announcements.values():
            await announcement.withdraw()
        await self.tasks.cancel()
        await self.directory.stop()
        await self.server.stop(0.1)
        assert self.errors == []

    async def join(self, name: str, **attributes: str) -> None:
        facts = {"model": "m", "engine": "simulated", **attributes}
        announcement = Announcement(self.store, Member("worker", name, "1", "127.0.0.1:1", "", facts))
        await announcement.start()
        self.announcements[name] = announcement

    async def leave(self, name: str) -> None:
        await self.announcements.pop(name).withdraw()

    async def model(self) -> stages_pb2.ModelStages:
        (found,) = (await self.stub.GetStages(stages_pb2.GetStagesRequest())).models
        return found

    async def until(self, condition: Callable[[stages_pb2.ModelStages], bool]) -> stages_pb2.ModelStages:
        async with asyncio.timeout(WAIT_S):
            while not condition(found := await self.model()):  # noqa: ASYNC110  each look is a call
                await asyncio.sleep(0.01)
            return found


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    host = StoreHost(SystemClock(), SystemEntropy())
    made = Bench(host, monkeypatch)
    await made.start()
    yield made
    await made.stop()
    host.close()


async def switch(bench: Bench, **fields: Any) -> stages_pb2.GetStagesResponse:
    answer: stages_pb2.GetStagesResponse = await bench.stub.SetStages(stages_pb2.SetStagesRequest(**fields))
    return answer


async def test_a_plan_waits_for_lengths_then_stands_and_is_taken_away(bench: Bench) -> None:
    for name in ("a", "b", "c", "d"):
        await bench.join(name)
    await switch(bench, enabled=True, method="chain")
    waiting = await bench.until(lambda model: bool(model.obstacle))
    assert waiting.obstacle == "0 requests have ended so far, a plan needs 50"
    bench.told = LengthStatistics(LENGTHS, 400.0, 0.0)
    bench.clock.at_s += desk_module.RETRY_S
    planned = await bench.until(lambda model: model.revision == 1)
    assert [len(stage.instances) for stage in planned.stages] == [1, 1, 1, 1]
    assert planned.stages[0].first_tokens == 1
    assert planned.stages[-1].last_tokens == 0
    assert [a.last_tokens + 1 for a in planned.stages[:-1]] == [b.first_tokens for b in planned.stages[1:]]
    assert (planned.profile, planned.obstacle, planned.lengths) == (DERIVED, "", len(LENGTHS))
    await switch(bench, enabled=False)
    await bench.until(lambda model: not model.revision)


async def test_instances_that_change_are_planned_for_once_they_settle(bench: Bench) -> None:
    bench.told = LengthStatistics(LENGTHS, 400.0, 0.0)
    for name in ("a", "b"):
        await bench.join(name)
    await switch(bench, enabled=True, method="chain")
    await bench.until(lambda model: model.revision == 1)
    await bench.join("c")
    await bench.leave("a")
    async with asyncio.timeout(WAIT_S):
        while {each.member_id for each in bench.directory.members("worker")} != {"b", "c"}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    covered = await bench.model()
    assert covered.revision == 1
    assert [instance.alive for stage in covered.stages for instance in stage.instances] == [False, True]
    assert (covered.stages[1].first_tokens, covered.stages[1].last_tokens) == (1, 0), "it covers the lost stage"

    def time_passes(model: stages_pb2.ModelStages) -> bool:
        bench.clock.at_s += desk_module.SETTLE_S + desk_module.RETRY_S
        return model.revision == 2

    settled = await bench.until(time_passes)
    assert {instance.instance_id for stage in settled.stages for instance in stage.instances} == {"b", "c"}


class Blind:
    """A store that cannot list what stands under one prefix."""

    def __init__(self, bench: Bench, prefix: str) -> None:
        self._bench = bench
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench.store, name)

    async def range(self, prefix: str) -> Any:
        if prefix == self._prefix:
            raise StoreError("the store is away")
        return await self._bench.store.range(prefix)

    def manager(self) -> StagePlanManager:
        """Another planner, restarted."""
        store: Any = self
        metrics = PlannerMetrics(CollectorRegistry())
        manager = StagePlanManager(store, self._bench.directory, "planner", Leading(), metrics, self._bench.runtime)
        manager.start(self._bench.tasks, self._bench.errors.append)
        return manager


async def planned(bench: Bench) -> None:
    bench.told = LengthStatistics(LENGTHS, 400.0, 0.0)
    for name in ("a", "b"):
        await bench.join(name)
    await switch(bench, enabled=True, method="chain")
    await bench.until(lambda model: model.revision == 1)


async def test_plans_stand_while_a_restarted_planner_has_not_heard_whether_stages_are_on(bench: Bench) -> None:
    await planned(bench)
    restarted = Blind(bench, STAGES_KEY).manager()
    async with asyncio.timeout(WAIT_S):
        while restarted.record("m") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for _ in range(20):
            await asyncio.sleep(desk_module.CHECK_S)
    assert (await bench.model()).revision == 1


async def test_a_restarted_planner_that_does_not_know_the_plans_yet_gives_no_revision_twice(bench: Bench) -> None:
    await planned(bench)
    Blind(bench, LAYOUT_PREFIX).manager()
    bench.clock.at_s += 1.0
    replanned = await bench.until(lambda model: model.planned_unix_ms > 1_000_000)
    assert replanned.revision > 1


async def test_a_clock_that_is_set_back_ends_no_planning(bench: Bench) -> None:
    await planned(bench)
    bench.clock.unix_at_s = 0.0
    bench.clock.at_s += desk_module.RETRY_S
    assert (await bench.until(lambda model: model.revision == 2)).planned_unix_ms == 0


async def test_plans_asked_for_at_the_same_time_have_a_revision_each(bench: Bench) -> None:
    await planned(bench)
    asked = stages_pb2.PlanStagesRequest()
    await asyncio.gather(*(bench.stub.PlanStages(asked) for _ in range(4)))
    await bench.until(lambda model: model.revision == 5)


async def test_boundaries_of_this_plan_are_shown_with_their_story(bench: Bench) -> None:
    bench.told = LengthStatistics(LENGTHS, 400.0, 0.0)
    for name in ("a", "b"):
        await bench.join(name)
    await switch(bench, enabled=True, method="chain")
    planned = await bench.until(lambda model: model.revision == 1)
    first = planned.stages[0].instances[0].instance_id
    for name, revision, tokens in ((first, 1, 777.0), ("stranger", 9, 5.0)):
        record = BoundaryRecord("m", name, tokens, revision, 123)
        await bench.store.put(boundary_key(name), msgspec.json.encode(record))
    refined = await bench.until(lambda model: model.stages[0].last_tokens == 777)
    assert refined.stages[0].planned_last_tokens == planned.stages[0].last_tokens
    assert [(move.instance_id, move.boundary_tokens) for move in refined.boundary_moves][-1] == (first, 777.0)
    await bench.stub.PlanStages(stages_pb2.PlanStagesRequest())
    left = [entry.key for entry in (await bench.store.range(BOUNDARY_PREFIX)).entries]
    assert left == [boundary_key(first)], "that of the stranger is forgotten"


async def test_plans_on_demand_need_stages_switched_on(bench: Bench) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="stages are switched off"):
        await bench.stub.PlanStages(stages_pb2.PlanStagesRequest())
    bench.told = LengthStatistics(LENGTHS, 400.0, 0.0)
    await bench.join("a")
    await switch(bench, enabled=True)
    await bench.until(lambda model: model.revision >= 1)
    before = (await bench.model()).revision
    await bench.stub.PlanStages(stages_pb2.PlanStagesRequest())
    await bench.until(lambda model: model.revision > before)


async def test_a_setting_that_cannot_be_is_refused(bench: Bench) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="stages cannot be set so"):
        await switch(bench, enabled=True, method="guess")
    kept = await switch(bench, enabled=True, refinement="memory", fewest_lengths=7)
    assert (kept.enabled, kept.method, kept.refinement) == (True, "exact", "memory")
    assert bench.manager.setting.fewest_lengths == 7
    assert bench.manager.setting.method is PartitionMethod.EXACT


async def test_instances_for_prefill_alone_take_no_part(bench: Bench) -> None:
    await bench.join("a")
    await bench.join("p", phase="prefill")
    async with asyncio.timeout(WAIT_S):
        while len(bench.directory.members("worker")) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [member.member_id for member in bench.manager.workers()["m"]] == ["a"]


def test_derived_quality_names_itself_and_is_positive() -> None:
    quality = quality_for([], "simulated", "m", 200.0)
    assert quality.profile == DERIVED
    assert (quality.model.coefficients > 0).all()


def test_a_profile_of_instances_of_the_same_shape_goes_before_others() -> None:
    narrow, wide = profile_of("m", 5.0), profile_of("m", 5.0, 4)
    assert quality_for([narrow, wide], "vllm", "m", 200.0, ReplicaShape(4)).profile == wide.key
    assert quality_for([wide, narrow], "vllm", "m", 200.0).profile == narrow.key
    assert quality_for([wide], "vllm", "m", 200.0).profile == wide.key
