"""Requests change stages between whole workers in mid-stream; the client hears what it would have heard without."""

import asyncio
from collections.abc import Callable
from math import inf

import msgspec
import pytest

from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import StageParameters
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.record import BoundaryRecord, StageRecord, boundary_key, layout_key
from controlplane.policies.stages.refinement import Refinement, RefinementParameters
from penstock.v1 import stages_pb2, stages_pb2_grpc
from tests.in_time import still
from tests.unit.engine_worker.coordinator.running_workers import (
    MODEL,
    WAIT_S,
    Workers,
    make_request,
    running_workers,
    undisturbed,
)

pytestmark = pytest.mark.live

pytest.importorskip("ucxx", reason="KV transfers need UCX")

QOE = QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4)


async def plan(mesh: Workers, layout: StageLayout, parameters: StageParameters | None = None) -> None:
    parameters = parameters or StageParameters(RefinementParameters(policy=Refinement.FROZEN), report_interval_s=0.1)
    record = StageRecord(layout, QOE, "a test", 0.0, 0, 0.0, 0, parameters=parameters)
    store = next(iter(mesh.workers.values())).context.store
    await store.put(layout_key(MODEL), msgspec.json.encode(record))
    await eventually(lambda: all(stage_of(mesh, each) == layout.stage_with(each) for each in mesh.workers))


def stage_of(mesh: Workers, name: str) -> int | None:
    manager = mesh.workers[name].role.stages.manager  # type: ignore[union-attr]
    manager.validate()
    return manager.stage


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  what other workers do sets no event here
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_requests_flow_through_three_stages_without_a_lost_token() -> None:
    async with running_workers("a", "b", "c") as mesh:
        await plan(mesh, StageLayout(MODEL, 1, (("a",), ("b",), ("c",)), (90, 160)))
        # Far beyond the last boundary, so that a busy machine still moves them before they end.
        requests = [make_request(f"r{salt}", prompt=40, max_tokens=500, salt=salt) for salt in range(3)]
        heard = [await mesh.generate("a", request) for request in requests]
        await mesh.until_ended(*(request.request_id for request in requests))
        # Each worker says on its own stream where a request has gone; the two streams are read in any order.
        assert [sorted(each.moved_to) for each in heard] == [["b", "c"]] * 3
        assert [each.token_ids for each in heard] == [undisturbed(request) for request in requests]
        assert mesh.workers["a"].metric("penstock_worker_stage_deals_total", outcome="moved") == 3
        assert mesh.workers["c"].metric("penstock_worker_stage") == 2
        for worker in mesh.workers.values():
            await eventually(lambda load=worker.engine.instance.load: load().kv_blocks_used == 0)  # type: ignore[misc]


async def test_a_short_answer_ends_where_it_began_and_its_lengths_are_told() -> None:
    async with running_workers("a", "b") as mesh:
        await plan(mesh, StageLayout(MODEL, 1, (("a",), ("b",)), (100,)))
        heard = await mesh.generate("a", make_request("r", prompt=40, max_tokens=30))
        await mesh.until_ended("r")
        assert heard.moved_to == []
        lengths = mesh.workers["a"].role.stages.lengths  # type: ignore[union-attr]
        await eventually(lambda: lengths.ended_total == 1)
        stub = stages_pb2_grpc.StagesStub(mesh.workers["a"].channel)  # type: ignore[no-untyped-call]
        told = await stub.GetLengths(stages_pb2.GetLengthsRequest(), timeout=WAIT_S)
        assert list(told.input_tokens) == [40]
        assert 1 <= told.output_tokens[0] <= 30


async def test_a_worker_that_has_left_the_stages_opens_no_stream() -> None:
    async with running_workers("a", "b") as mesh:
        await plan(mesh, StageLayout(MODEL, 1, (("a", "b"),), ()))
        stages = mesh.workers["a"].role.stages
        assert stages is not None
        await eventually(lambda: bool(stages._links._outboxes))
        await stages.stop()
        assert not stages._links._outboxes
        assert stages.manager.agent is not None
        stages.manager.agent._reported_ms = -inf  # a report is due
        stages.tick()
        assert not stages._links._outboxes


@pytest.mark.slow
async def test_load_evens_out_within_a_stage() -> None:
    async with running_workers("a", "b") as mesh:
        parameters = StageParameters(RefinementParameters(policy=Refinement.FROZEN), report_interval_s=0.1)
        await plan(mesh, StageLayout(MODEL, 1, (("a", "b"),), ()), parameters)
        requests = [make_request(f"r{salt}", prompt=64, max_tokens=400, salt=salt) for salt in range(6)]
        heard = [await mesh.generate("a", request) for request in requests]
        await mesh.until(lambda: any(each.moved_to == ["b"] for each in heard))
        await mesh.until_ended(*(request.request_id for request in requests))
        assert [each.token_ids for each in heard] == [undisturbed(request) for request in requests]


@pytest.mark.slow
async def test_a_moved_boundary_stands_in_the_store() -> None:
    async with running_workers("a", "b") as mesh:
        parameters = StageParameters(
            RefinementParameters(interval_s=0.2, smoothing=1.0, fewest_requests=2),
            report_interval_s=0.1,
            rebalance=False,
        )
        await plan(mesh, StageLayout(MODEL, 7, (("a",), ("b",)), (10_000,)), parameters)
        long = make_request("long", prompt=2000, max_tokens=400)
        requests = [long, *(make_request(f"r{salt}", prompt=50, max_tokens=400, salt=salt) for salt in range(4))]
        heard = [await mesh.generate("b", long)]
        await mesh.until_tokens("long", 2)
        heard += [await mesh.generate("a", request) for request in requests[1:]]
        store = mesh.workers["a"].context.store

        async def boundary() -> BoundaryRecord:
            entry = await store.get(boundary_key("a"))
            assert entry is not None
            return msgspec.json.decode(entry.value, type=BoundaryRecord)

        async with asyncio.timeout(WAIT_S):
            # Between the many short ones and the long one; before its neighbour's report it may be elsewhere.
            while not 2000 <= (found := await boundary()).boundary_tokens < 2500:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert found.revision == 7
        await mesh.until_ended(*(request.request_id for request in requests))
        assert [each.token_ids for each in heard] == [undisturbed(request) for request in requests]


@pytest.mark.slow
async def test_plans_that_change_in_mid_stream_drop_no_request() -> None:
    async with running_workers("a", "b", "c") as mesh:
        await plan(mesh, StageLayout(MODEL, 1, (("a",), ("b",), ("c",)), (80, 2000)))
        # Long enough that none ends before the last plan is known, however busy the machine is.
        requests = [make_request(f"r{salt}", prompt=40, max_tokens=1200, salt=salt) for salt in range(4)]
        heard = [await mesh.generate("a", request) for request in requests]
        await mesh.until(lambda: all(each.moved_to == ["b"] for each in heard))
        await plan(mesh, StageLayout(MODEL, 2, (("b",), ("c", "a")), (150,)))
        # Those that come to the same worker may be evened out within its stage at once.
        await mesh.until(lambda: all(len(each.moved_to) >= 2 for each in heard))
        await plan(mesh, StageLayout(MODEL, 3, (("a", "b", "c"),), ()))
        await mesh.until_ended(*(request.request_id for request in requests))
        assert all({"a", "c"} & set(each.moved_to) for each in heard)
        assert [each.token_ids for each in heard] == [undisturbed(request) for request in requests]


@pytest.mark.slow
async def test_a_stage_whose_last_worker_leaves_is_covered_and_a_plan_taken_away_ends_the_stages() -> None:
    async with running_workers("a", "b", "c") as mesh:
        layout = StageLayout(MODEL, 1, (("a",), ("b",), ("c",)), (90, 160))
        await plan(mesh, layout)
        request = make_request("r", prompt=40, max_tokens=600)
        heard = await mesh.generate("a", request)
        # Its drain begins; who watches the members sees it leave.
        await mesh.workers["b"].announcement.withdraw()
        await eventually(lambda: stage_of(mesh, "c") == 1)
        await mesh.until_ended("r")
        still(bool(heard.moved_to), "it runs until it is moved")
        assert heard.moved_to == ["c"]
        assert heard.token_ids == undisturbed(request)
        await mesh.workers["b"].context.store.delete(layout_key(MODEL))
        await eventually(lambda: stage_of(mesh, "a") is None and stage_of(mesh, "c") is None)
        stays = await mesh.generate("a", make_request("s", prompt=40, max_tokens=150))
        await mesh.until_ended("s")
        assert stays.moved_to == []


async def test_a_stream_to_another_incarnation_is_refused() -> None:
    async with running_workers("a", "b") as mesh:
        stub = stages_pb2_grpc.StagesStub(mesh.workers["a"].channel)  # type: ignore[no-untyped-call]
        call = stub.Tell()
        hello = stages_pb2.StageHello(instance_id="b", incarnation_id="1", listener_incarnation_id="of old")
        await call.write(stages_pb2.StageMessage(hello=hello))
        assert "of old was spoken to" in await call.details()


async def test_a_plan_of_a_former_leader_changes_nothing() -> None:
    async with running_workers("a", "b") as mesh:
        store = mesh.workers["a"].context.store

        async def put(stages: tuple[tuple[str, ...], ...], epoch: int) -> None:
            layout = StageLayout(MODEL, epoch, stages, (90,))
            record = StageRecord(layout, QOE, "a test", 0.0, 0, 0.0, 0, epoch=epoch, leader=f"planner-{epoch}")
            await store.put(layout_key(MODEL), msgspec.json.encode(record))

        await put((("a",), ("b",)), 7)
        await eventually(lambda: stage_of(mesh, "b") == 1)
        await put((("b",), ("a",)), 5)
        refused = "penstock_worker_refused_orders_total"
        await eventually(lambda: all(each.metric(refused, duty="stages") == 1 for each in mesh.workers.values()))
        assert (stage_of(mesh, "a"), stage_of(mesh, "b")) == (0, 1)
        await put((("b",), ("a",)), 8)
        await eventually(lambda: stage_of(mesh, "b") == 0)
