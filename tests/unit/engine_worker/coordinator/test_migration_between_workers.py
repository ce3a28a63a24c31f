"""Requests move between whole workers: the client hears exactly what it would have heard without."""

import asyncio
import time
from dataclasses import replace

import pytest

from engine_worker.coordinator.loads import ready_loads
from engine_worker.settings import WorkerSettings
from mesh.errors import IllegalTransition
from mesh.exit_status import ExitStatus
from mesh.tracing import Tracer
from penstock.v1 import request_pb2, worker_pb2
from tests.in_time import still
from tests.unit.engine_worker.coordinator.running_workers import (
    MODEL,
    WAIT_S,
    make_request,
    running_workers,
    undisturbed,
)
from tests.unit.mesh.test_tracing import PARENT, Chance, Recorded, SetClock

pytestmark = pytest.mark.live

pytest.importorskip("ucxx", reason="KV transfers need UCX")


@pytest.mark.slow
async def test_a_request_moves_in_mid_stream_and_back_without_a_lost_token() -> None:
    async with running_workers("a", "b") as mesh:
        request = make_request("r", prompt=100, max_tokens=400)
        heard = await mesh.generate("a", request)
        await mesh.until_tokens("r", 20)
        answer = await mesh.migrate("a", "r", "b")
        assert answer.moved, answer.reason
        assert answer.blocks >= 7
        # The two streams may be read in any order, and a busy machine copies slowly.
        await mesh.until(lambda: heard.moved_to == ["b"] and heard.owner == "b" and len(heard.token_ids) >= 70)
        assert heard.epoch == 1
        assert len(mesh.workers["a"].instance.table) == 0
        back = await mesh.migrate("b", "r", "a")
        assert back.moved, back.reason
        await mesh.until_ended("r")
        assert (heard.owner, heard.epoch) == ("a", 2)
        assert heard.token_ids == undisturbed(request)
        assert mesh.workers["a"].metric("penstock_worker_migrations_total", direction="out", outcome="moved") == 1
        assert mesh.workers["a"].metric("penstock_worker_migrations_total", direction="in", outcome="committed") == 1
        assert mesh.workers["a"].metric("penstock_worker_migration_paused_seconds_count") == 1
        for worker in mesh.workers.values():
            worker.engine.instance.validate()
            assert worker.engine.instance.load().kv_blocks_used == 0


async def test_what_is_predicted_of_a_request_moves_with_it() -> None:
    settings = WorkerSettings(
        model=MODEL, model_path="/none", engine="simulated", engine_arg=("cost.fixed_ms=4",), predict_every_steps=0
    )
    async with running_workers("a", "b", settings=settings) as mesh:
        for name in ("r", "s"):
            await mesh.generate("a", make_request(name, prompt=100, max_tokens=300))
            await mesh.until_tokens(name, 5)
        mesh.workers["a"].instance.table.predicted("r", 5, 250, (100, 295))
        for name in ("r", "s"):
            assert (await mesh.migrate("a", name, "b")).moved
        moved = {name: mesh.workers["b"].instance.table.find(name) for name in ("r", "s")}
        assert {name: tracked.predicted_end_tokens for name, tracked in moved.items()} == {"r": 255, "s": None}
        assert {name: tracked.predicted_band_tokens for name, tracked in moved.items()} == {"r": (105, 300), "s": None}
        assert 0 < moved["r"].remaining_tokens < 250


async def test_a_move_is_a_span_between_those_of_its_request() -> None:
    recorded = Recorded()
    tracer = Tracer(recorded, SetClock(), Chance())
    async with running_workers("a", "b", tracer=tracer) as mesh:
        heard = await mesh.generate("a", replace(make_request("r", prompt=100, max_tokens=300), traceparent=PARENT))
        await mesh.until_tokens("r", 10)
        assert (await mesh.migrate("a", "r", "b")).moved
        await mesh.until(lambda: bool(heard.moved_to))
        refused = await mesh.migrate("a", "r", "b")
        assert not refused.moved
        await mesh.until_ended("r")
    names = [span.name for span in recorded.spans]
    assert sorted(names) == ["decode", "decode", "move", "prefill"]
    assert {str(span.parent) for span in recorded.spans} == {PARENT}
    move = recorded.spans[names.index("move")]
    assert (move.attributes["target"], move.attributes["moved"], move.error) == ("b", True, "")
    assert move.attributes["blocks"]


@pytest.mark.slow
async def test_a_request_that_moved_has_ended_where_it_did_and_nowhere_else() -> None:
    async with running_workers("a", "b") as mesh:
        await mesh.generate("a", make_request("r", prompt=100, max_tokens=400))
        await mesh.until_tokens("r", 20)
        lengths = {name: worker.role.stages.lengths for name, worker in mesh.workers.items()}  # type: ignore[union-attr]
        for name, worker in mesh.workers.items():
            lengths[name].look(worker.instance.table, time.monotonic())
        assert (await mesh.migrate("a", "r", "b")).moved
        await mesh.until_tokens("r", 70)
        for name, worker in mesh.workers.items():
            lengths[name].look(worker.instance.table, time.monotonic())
        await mesh.until_ended("r")
        for name, worker in mesh.workers.items():
            lengths[name].look(worker.instance.table, time.monotonic())
        assert {name: each.ended_total for name, each in lengths.items()} == {"a": 0, "b": 1}


async def test_stop_and_copy_moves_all_in_one_piece() -> None:
    async with running_workers("a", "b") as mesh:
        request = make_request("r", prompt=600, max_tokens=300)
        heard = await mesh.generate("a", request)
        await mesh.until_tokens("r", 5)
        answer = await mesh.migrate("a", "r", "b", stop_and_copy=True)
        assert answer.moved, answer.reason
        assert answer.rounds == 0
        await mesh.until_ended("r")
        assert heard.token_ids == undisturbed(request)


@pytest.mark.slow
async def test_a_migration_ordered_during_the_prefill_follows_it() -> None:
    async with running_workers("a", "b", options=("instance.max_step_tokens=256", "cost.fixed_ms=25")) as mesh:
        request = make_request("r", prompt=4000, max_tokens=60)
        heard = await mesh.generate("a", request)
        engine = mesh.workers["a"].engine
        async with asyncio.timeout(WAIT_S):
            while not engine.instance.request_ids:  # noqa: ASYNC110  the other end of a socket sets no event here
                await asyncio.sleep(0.001)
        assert not heard.token_ids
        answer = await mesh.migrate("a", "r", "b")
        assert answer.moved, answer.reason
        assert answer.rounds >= 2, "the rounds follow the prefill"
        still(len(heard.token_ids) < 20, "it moved soon after its first token")
        await mesh.until_ended("r")
        assert heard.token_ids == undisturbed(request)


@pytest.mark.parametrize(
    ("request_id", "target", "reason"),
    [("unknown", "b", "does not run here"), ("r", "nowhere", "no instance"), ("r", "a", "already")],
)
async def test_an_impossible_order_is_refused(request_id: str, target: str, reason: str) -> None:
    async with running_workers("a", "b") as mesh:
        request = make_request("r", max_tokens=300)
        heard = await mesh.generate("a", request)
        await mesh.until_tokens("r", 2)
        answer = await mesh.migrate("a", request_id, target)
        assert not answer.moved
        assert reason in answer.reason
        await mesh.until_ended("r")
        assert heard.token_ids == undisturbed(request)
        assert heard.epoch == 0


@pytest.mark.slow
async def test_a_target_without_room_leaves_the_request_where_it_is() -> None:
    async with running_workers("a", "b", options=("instance.kv_blocks=512",)) as mesh:
        hog = make_request("hog", prompt=7000, max_tokens=900, salt=1)
        await mesh.generate("b", hog)
        await mesh.until_tokens("hog", 1)
        request = make_request("r", prompt=2000, max_tokens=300)
        heard = await mesh.generate("a", request)
        await mesh.until_tokens("r", 5)
        answer = await mesh.migrate("a", "r", "b")
        still(not mesh.heard["hog"].finish_reason, "there is no room at the target")
        assert not answer.moved
        assert "too few free KV blocks" in answer.reason
        await mesh.until_ended("r")
        assert (heard.owner, heard.token_ids) == ("a", undisturbed(request))


@pytest.mark.parametrize("error", [IllegalTransition("it cannot start"), RuntimeError("a bug")])
async def test_what_the_target_cannot_run_after_all_is_recovered_and_leaves_no_blocks_there(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_workers("a", "b") as mesh:

        def breaks(request_id: str, tokens: int) -> None:
            raise error

        monkeypatch.setattr(mesh.workers["b"].engine.instance, "complete_import", breaks)
        heard = await mesh.generate("a", make_request("r", max_tokens=400))
        await mesh.until_tokens("r", 5)
        assert (await mesh.migrate("a", "r", "b")).moved
        await mesh.until_ended("r")
        assert heard.error is not None
        assert (heard.owner, heard.error.code) == ("b", request_pb2.ERROR_CODE_LOST)
        for worker in mesh.workers.values():
            assert len(worker.instance.table) == 0
            async with asyncio.timeout(WAIT_S):
                while worker.engine.instance.load().kv_blocks_used:  # noqa: ASYNC110  nobody is told when they are free
                    await asyncio.sleep(0.001)


@pytest.mark.slow
async def test_a_frontend_unknown_to_the_target_keeps_the_request_where_it_is() -> None:
    async with running_workers("a", "b") as mesh:
        mesh.workers["b"].call.cancel()
        request = make_request("r")
        heard = await mesh.generate("a", request)
        await mesh.until_tokens("r", 5)
        answer = await mesh.migrate("a", "r", "b")
        assert not answer.moved
        assert "no stream" in answer.reason
        await mesh.until_ended("r")
        assert heard.token_ids == undisturbed(request)


@pytest.mark.slow
async def test_a_drain_moves_every_stream_and_ends_the_worker() -> None:
    async with running_workers("a", "b", "c") as mesh:
        requests = [make_request(f"r{number}", 60 + 20 * number, 500, salt=number) for number in range(16)]
        for request in requests:
            await mesh.generate("a", request)
        await mesh.until(lambda: all(len(each.token_ids) > 3 for each in mesh.heard.values()))
        await mesh.workers["a"].stub.Drain(worker_pb2.DrainRequest(migrate=True))
        ending = mesh.workers["a"].context.shutdown
        await asyncio.wait_for(ending.asked.wait(), WAIT_S)
        assert ending.status is ExitStatus.DRAINED
        await mesh.until_ended(*mesh.heard)
        still({each.owner for each in mesh.heard.values()} == {"b", "c"}, "none ends before it is moved")
        for request in requests:
            assert mesh.heard[request.request_id].token_ids == undisturbed(request)


@pytest.mark.slow
async def test_a_sigterm_moves_what_runs_before_the_worker_ends() -> None:
    async with running_workers("a", "b") as mesh:
        request = make_request("r", max_tokens=300)
        heard = await mesh.generate("a", request)
        await mesh.until_tokens("r", 5)
        await asyncio.wait_for(mesh.workers["a"].role.drain(), WAIT_S)
        still(len(heard.token_ids) < 300, "it has not ended before it is moved")
        await mesh.until_ended("r")
        assert (heard.owner, heard.token_ids) == ("b", undisturbed(request))


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["a", "b"])
async def test_a_worker_whose_blocks_cannot_move_says_so_and_is_left_alone(broken: str) -> None:
    async with running_workers("a", "b") as mesh:
        worker = mesh.workers[broken]
        agent = worker.engine.kv_agent()
        agent._fabric.obstacle = lambda: "UCX has no route"
        agent._doubt.set()
        async with asyncio.timeout(WAIT_S):
            # It is looked for once a second, and its coordinator looks around every 50 ms.
            while not worker.role.coordinator._obstacle:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        heard = await mesh.generate("a", make_request("r"))
        await mesh.until_tokens("r", 5)
        answer = await mesh.migrate("a", "r", "b")
        assert not answer.moved
        assert "UCX has no route" in answer.reason
        load = (await worker.stub.GetLoad(worker_pb2.GetLoadRequest())).load
        assert load.transfer_obstacle == "UCX has no route"
        await worker.context.directory.follow("worker")
        members = worker.context.directory.members("worker")
        loads = await ready_loads(worker.context.runtime.transport, members)
        assert set(loads) == {"a", "b"} - {broken}, "no drain takes it for a target"
        assert worker.metric("penstock_worker_transfer_obstacle") == 1
        await mesh.until_ended("r")
        assert heard.token_ids == undisturbed(make_request("r"))
