"""Prefill here, decode there: the client hears exactly what one instance would have said."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controlplane.protocols.migration.limits import ManagerLimits
from engine_worker.coordinator.loads import ready_loads
from mesh.announcement import Announcement
from mesh.exit_status import ExitStatus
from mesh.membership import Member
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from penstock.v1 import migration_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from tests.in_time import still
from tests.unit.engine_worker.coordinator.lost_peers import scripted_target
from tests.unit.engine_worker.coordinator.running_workers import (
    WAIT_S,
    Worker,
    make_request,
    running_workers,
    undisturbed,
)

pytestmark = pytest.mark.live

pytest.importorskip("ucxx", reason="KV transfers need UCX")

SLOW_PREFILL = ("instance.max_step_tokens=256", "cost.fixed_ms=10")


def transfers(worker: Worker, outcome: str) -> float:
    return worker.metric("penstock_worker_transfers_total", outcome=outcome)


async def pulled_bytes(worker: Worker) -> int:
    return int((await worker.engine._agent.status()).pulled_bytes_total)


@pytest.mark.slow
async def test_the_first_token_comes_from_one_instance_and_the_rest_from_another() -> None:
    async with running_workers("p", "d", options=SLOW_PREFILL) as mesh:
        request = make_request("r", prompt=2000, max_tokens=300)
        heard = await mesh.generate("p", request, decode="d")
        await mesh.until_tokens("r", 1)
        still(heard.owner == "p", "the first token is seen before the second")
        await mesh.until_ended("r")
        assert heard.token_ids == undisturbed(request)
        still(bool(heard.moved_to), "it is moved before it ends")
        assert (heard.owner, heard.moved_to, heard.epoch) == ("d", ["d"], 1)
        prefill, decode = mesh.workers["p"], mesh.workers["d"]
        assert transfers(prefill, "moved") == 1
        assert prefill.metric("penstock_worker_transfer_seconds_count") == 1
        assert decode.engine.load().prefilled_tokens_total <= 1, "nothing of the prompt is computed again"
        assert decode.engine.load().generated_tokens_total >= 40
        assert await pulled_bytes(decode) > 0
        for worker in (prefill, decode):
            worker.engine.instance.validate()
            assert worker.engine.instance.load().kv_blocks_used == 0


@pytest.mark.slow
async def test_many_at_once_all_move_while_a_long_prefill_goes_on() -> None:
    async with running_workers("p", "d1", "d2", options=SLOW_PREFILL) as mesh:
        requests = [make_request("long", 3500, 80, salt=99)]
        requests += [make_request(f"r{number}", 60 + 30 * number, 80, salt=number) for number in range(12)]
        for number, request in enumerate(requests):
            await mesh.generate("p", request, decode=f"d{1 + number % 2}")
        await mesh.until_ended(*mesh.heard)
        for request in requests:
            assert mesh.heard[request.request_id].token_ids == undisturbed(request)
        still(all(each.moved_to for each in mesh.heard.values()), "each is moved before it ends")
        assert transfers(mesh.workers["p"], "moved") == len(requests)
        assert {each.owner for each in mesh.heard.values()} == {"d1", "d2"}


async def test_both_phases_on_one_instance_cost_no_transfer() -> None:
    async with running_workers("a", "b") as mesh:
        request = make_request("r", prompt=300, max_tokens=30)
        heard = await mesh.generate("a", request, decode="a")
        await mesh.until_ended("r")
        assert heard.token_ids == undisturbed(request)
        assert (heard.owner, heard.epoch) == ("a", 0)
        worker = mesh.workers["a"]
        assert [transfers(worker, outcome) for outcome in ("moved", "failed", "skipped")] == [0, 0, 0]
        assert worker.metric("penstock_worker_migrations_total", direction="out", outcome="moved") == 0
        assert [await pulled_bytes(each) for each in mesh.workers.values()] == [0, 0]


@pytest.mark.slow
async def test_without_room_there_the_request_is_decoded_here_loudly(caplog: pytest.LogCaptureFixture) -> None:
    async with running_workers("p", "d", options=("instance.kv_blocks=512",)) as mesh:
        await mesh.generate("d", make_request("hog", prompt=7000, max_tokens=900, salt=1))
        await mesh.until_tokens("hog", 1)
        request = make_request("r", prompt=2000, max_tokens=300)
        with caplog.at_level(logging.WARNING):
            heard = await mesh.generate("p", request, decode="d")
            await mesh.until_ended("r")
        still(not heard.moved_to, "the decode instance is full")
        assert (heard.owner, heard.token_ids) == ("p", undisturbed(request))
        assert transfers(mesh.workers["p"], "failed") == 1
        assert "decoded where it was prefilled" in caplog.text


async def test_a_decode_instance_that_is_not_there_leaves_the_request_where_it_is() -> None:
    async with running_workers("p") as mesh:
        request = make_request("r", max_tokens=20)
        heard = await mesh.generate("p", request, decode="nowhere")
        await mesh.until_ended("r")
        assert (heard.owner, heard.token_ids) == ("p", undisturbed(request))
        assert transfers(mesh.workers["p"], "failed") == 1


async def test_a_request_that_ends_before_it_moves_is_no_failure() -> None:
    async with running_workers("p", "d", options=SLOW_PREFILL) as mesh:
        await mesh.generate("p", make_request("taken-back", prompt=3500, max_tokens=50), decode="d")
        engine = mesh.workers["p"].engine
        async with asyncio.timeout(WAIT_S):
            while not engine.instance.request_ids:  # noqa: ASYNC110  the other end of a socket sets no event here
                await asyncio.sleep(0.001)
        await mesh.abort("p", "taken-back")
        await mesh.until_ended("taken-back")
        request = make_request("one", prompt=40, max_tokens=1, salt=5)
        heard = await mesh.generate("p", request, decode="d")
        await mesh.until_ended("one")
        assert heard.token_ids == undisturbed(request)
        async with asyncio.timeout(WAIT_S):
            while transfers(mesh.workers["p"], "skipped") < 2:  # noqa: ASYNC110  a counter of another part has no event
                await asyncio.sleep(0.01)
        assert transfers(mesh.workers["p"], "failed") == 0
        assert mesh.workers["d"].engine.instance.load().kv_blocks_used == 0


async def test_a_request_that_waits_in_the_queue_holds_no_memory_of_its_decode_instance() -> None:
    options = ("instance.max_batch_requests=1", "cost.fixed_ms=10")
    async with running_workers("p", "d", options=options) as mesh:
        first = make_request("first", prompt=50, max_tokens=3000)  # it is aborted in the end
        await mesh.generate("p", first)
        await mesh.until_tokens("first", 3)
        second = make_request("second", prompt=1000, max_tokens=200, salt=3)
        heard = await mesh.generate("p", second, decode="d")
        await mesh.until_tokens("first", 20)
        assert mesh.workers["d"].engine.instance.load().kv_blocks_used == 0
        await mesh.abort("p", "first")
        await mesh.until_ended("second")
        still(bool(heard.moved_to), "it is moved before it ends")
        assert (heard.owner, heard.token_ids) == ("d", undisturbed(second))


class PlayedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Answers who decodes."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.asked: list[scheduler_pb2.PlaceDecodeRequest] = []

    async def PlaceDecode(
        self, request: scheduler_pb2.PlaceDecodeRequest, context: Any
    ) -> scheduler_pb2.PlaceDecodeResponse:
        self.asked.append(request)
        return scheduler_pb2.PlaceDecodeResponse(instance_id=self.answer)


@asynccontextmanager
async def played_scheduler(beside: Worker, answer: str) -> AsyncIterator[PlayedScheduler]:
    scheduler, server = PlayedScheduler(answer), RpcServer(GrpcTransport())
    server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler, "penstock.v1.Scheduler")
    await server.start()
    member = Member("scheduler", "s", "00000abc", server.address, "")
    announcement = Announcement(beside.context.store, member)
    await announcement.start()
    await beside.context.directory.wait_for("scheduler", 1, WAIT_S)
    try:
        yield scheduler
    finally:
        await announcement.withdraw()
        await server.stop(0)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["d", ""])
async def test_who_decodes_is_asked_after_the_first_token(answer: str) -> None:
    async with running_workers("p", "d", options=SLOW_PREFILL) as mesh:
        async with played_scheduler(mesh.workers["p"], answer) as scheduler:
            request = make_request("r", prompt=1500, max_tokens=150)
            heard = await mesh.generate("p", request, is_decode_open=True)
            await mesh.until_ended("r")
        (asked,) = scheduler.asked
        assert (asked.request_id, asked.model, asked.prefill_instance_id) == ("r", "m", "p")
        assert (asked.prompt_tokens, asked.max_tokens) == (1500, 150)
        still(bool(heard.moved_to) == bool(answer), "it is moved before it ends")
        assert (heard.owner, heard.token_ids) == (answer or "p", undisturbed(request))
        assert transfers(mesh.workers["p"], "moved") == bool(answer)
        assert transfers(mesh.workers["p"], "failed") == 0


async def test_without_a_scheduler_to_ask_the_request_is_decoded_here_loudly(caplog: pytest.LogCaptureFixture) -> None:
    async with running_workers("p", "d") as mesh:
        request = make_request("r", max_tokens=40)
        with caplog.at_level(logging.WARNING):
            heard = await mesh.generate("p", request, is_decode_open=True)
            await mesh.until_ended("r")
        assert (heard.owner, heard.token_ids) == ("p", undisturbed(request))
        assert transfers(mesh.workers["p"], "failed") == 1
        assert any("no scheduler" in getattr(record, "reason", "") for record in caplog.records)


async def test_nobody_is_asked_about_a_request_that_ends_with_its_first_token() -> None:
    async with running_workers("p", "d") as mesh, played_scheduler(mesh.workers["p"], "d") as scheduler:
        await mesh.generate("p", make_request("r", max_tokens=1), is_decode_open=True)
        await mesh.until_ended("r")
        assert not scheduler.asked
        assert not mesh.workers["p"].role.coordinator.manager.transfers  # type: ignore[union-attr]


@pytest.mark.slow
async def test_a_drain_moves_requests_to_instances_that_decode_if_there_are_any() -> None:
    async with running_workers("a", "d", "p", phases={"d": "decode", "p": "prefill"}) as mesh:
        requests = [make_request(f"r{number}", 60, 250, salt=number) for number in range(4)]
        for request in requests:
            await mesh.generate("a", request)
        await mesh.until(lambda: all(each.token_ids for each in mesh.heard.values()))
        peers = mesh.workers["a"].role.coordinator.peers.known  # type: ignore[union-attr]
        assert set(await ready_loads(GrpcTransport(), await peers())) == {"d"}
        await mesh.workers["a"].stub.Drain(worker_pb2.DrainRequest(migrate=True))
        ending = mesh.workers["a"].context.shutdown
        await asyncio.wait_for(ending.asked.wait(), WAIT_S)
        assert ending.status is ExitStatus.DRAINED
        await mesh.until_ended(*mesh.heard)
        still(all(each.moved_to for each in mesh.heard.values()), "each is moved before it ends")
        assert {each.owner for each in mesh.heard.values()} == {"d"}
        for request in requests:
            assert mesh.heard[request.request_id].token_ids == undisturbed(request)
        await mesh.workers["d"].stub.Drain(worker_pb2.DrainRequest())
        assert set(await ready_loads(GrpcTransport(), await peers())) == {"p"}


@pytest.mark.slow
async def test_a_drained_prefill_instance_transfers_what_it_has_begun() -> None:
    async with running_workers("p", "d", options=SLOW_PREFILL) as mesh:
        requests = [make_request(f"r{number}", 800, 60, salt=number) for number in range(3)]
        for request in requests:
            await mesh.generate("p", request, decode="d")
        await mesh.until_tokens("r0", 1)
        await mesh.workers["p"].stub.Drain(worker_pb2.DrainRequest(migrate=True))
        ending = mesh.workers["p"].context.shutdown
        await asyncio.wait_for(ending.asked.wait(), WAIT_S)
        assert ending.status is ExitStatus.DRAINED
        await mesh.until_ended(*mesh.heard)
        still(all(each.moved_to for each in mesh.heard.values()), "each is moved before it ends")
        assert {each.owner for each in mesh.heard.values()} == {"d"}
        for request in requests:
            assert mesh.heard[request.request_id].token_ids == undisturbed(request)


async def test_a_decode_instance_that_is_full_for_a_moment_is_asked_again() -> None:
    async with running_workers("p") as mesh, scripted_target(mesh.workers["p"]) as target:
        heard = await mesh.generate("p", make_request("r", prompt=100, max_tokens=400), decode="z")
        for _ in range(2):
            offer = await target.hear("offer")
            target.say(refuse=migration_pb2.MigrationRefuse(migration_id=offer.migration_id, reason="full just now"))
        migration_id = await target.accept()
        target.say(committed=migration_pb2.MigrationCommitted(migration_id=migration_id))
        await mesh.until(lambda: heard.moved_to == ["z"])
        assert transfers(mesh.workers["p"], "moved") == 1
        assert transfers(mesh.workers["p"], "failed") == 0


@pytest.mark.slow
async def test_a_decode_instance_that_stays_full_is_given_up_after_a_few_offers() -> None:
    async with running_workers("p") as mesh, scripted_target(mesh.workers["p"]) as target:
        request = make_request("r", prompt=100, max_tokens=400)
        heard = await mesh.generate("p", request, decode="z")
        for _ in range(ManagerLimits().transfer_tries):
            offer = await target.hear("offer")
            target.say(refuse=migration_pb2.MigrationRefuse(migration_id=offer.migration_id, reason="full"))
        await mesh.until_ended("r")
        assert (heard.owner, heard.token_ids) == ("p", undisturbed(request))
        # An offer that waits too long for its answer is taken back, and its answer comes to nothing.
        still(target.heard.empty(), "it is asked four times, and not a fifth time")
        assert transfers(mesh.workers["p"], "failed") == 1


async def test_what_is_there_when_a_move_is_ordered_is_copied_at_once() -> None:
    slow = ("cost.fixed_ms=300",)
    async with running_workers("p", options=slow) as mesh, scripted_target(mesh.workers["p"]) as target:
        heard = await mesh.generate("p", make_request("r", prompt=96, max_tokens=60))
        await mesh.until_tokens("r", 2)
        moving = asyncio.create_task(mesh.migrate("p", "r", "z"))
        offer = await target.hear("offer")
        target.say(accept=migration_pb2.MigrationAccept(migration_id=offer.migration_id))
        first_round = await target.hear("round")
        assert len(first_round.block_ids) == 6
        still(len(heard.token_ids) < 14, "not only with the next block that is full")
        target.lose()
        assert not (await moving).moved
