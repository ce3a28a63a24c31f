"""Peers that refuse, die or fall silent in mid-migration: the request goes on, or is given up once and loudly."""

import asyncio
from typing import Any

import pytest

from controlplane.protocols.migration.limits import ManagerLimits
from mesh.errors import EngineFailed
from penstock.v1 import migration_pb2, request_pb2, worker_pb2
from tests.unit.engine_worker.coordinator.lost_peers import ScriptedSource, scripted_target
from tests.unit.engine_worker.coordinator.running_workers import (
    FRONTEND,
    MODEL,
    WAIT_S,
    Workers,
    make_request,
    running_workers,
    undisturbed,
)

pytestmark = pytest.mark.live

pytest.importorskip("ucxx", reason="KV transfers need UCX")

REQUEST = make_request("r", prompt=100, max_tokens=400)


async def start(mesh: Workers) -> asyncio.Task[worker_pb2.MigrateResponse]:
    """A stream on "a", and the order to move it to "z"."""
    await mesh.generate("a", REQUEST)
    await mesh.until_tokens("r", 5)
    return asyncio.create_task(mesh.migrate("a", "r", "z"))


async def goes_on(mesh: Workers) -> None:
    await mesh.until_ended("r")
    heard = mesh.heard["r"]
    assert (heard.owner, heard.epoch, heard.moved_to) == ("a", 0, [])
    assert heard.token_ids == undisturbed(REQUEST)
    assert mesh.workers["a"].engine.instance.load().kv_blocks_used == 0


@pytest.mark.slow
async def test_a_target_that_refuses() -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:
        order = await start(mesh)
        offer = await target.hear("offer")
        assert (offer.frontend_id, offer.request.epoch) == (FRONTEND, 1)
        target.say(refuse=migration_pb2.MigrationRefuse(migration_id=offer.migration_id, reason="too busy"))
        answer = await order
        assert answer.reason == "too busy"
        await goes_on(mesh)


@pytest.mark.slow
async def test_a_target_that_dies_before_the_final_message() -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:
        order = await start(mesh)
        offer = await target.hear("offer")
        target.say(accept=migration_pb2.MigrationAccept(migration_id=offer.migration_id))
        await target.hear("round")
        target.lose()
        answer = await order
        assert not answer.moved
        await goes_on(mesh)


async def test_a_target_that_dies_before_it_commits_has_the_request_recovered() -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:
        order = await start(mesh)
        await target.accept()
        target.lose()
        answer = await order
        assert not answer.moved
        await mesh.until_ended("r")
        error = mesh.heard["r"].error
        assert error is not None
        assert error.code == request_pb2.ERROR_CODE_LOST
        worker = mesh.workers["a"]
        assert len(worker.instance.table) == 0
        await mesh.generate("a", make_request("after", max_tokens=10))
        await mesh.until_ended("after")
        assert worker.engine.instance.request_ids == ()
        assert worker.metric("penstock_worker_migrations_total", direction="out", outcome="lost") == 1


@pytest.mark.slow
async def test_a_target_that_fails_to_commit_gives_the_request_back() -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:
        order = await start(mesh)
        migration_id = await target.accept()
        target.say(failed=migration_pb2.MigrationFailed(migration_id=migration_id, reason="blocks torn"))
        answer = await order
        assert answer.reason == "blocks torn"
        assert answer.paused_ms > 0
        assert answer.blocks > 0
        assert mesh.workers["a"].metric("penstock_worker_migrated_kv_blocks_total", direction="out") == 0, "none moved"
        await goes_on(mesh)


@pytest.mark.slow
async def test_a_silent_target_is_asked_to_give_the_request_back_and_does() -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:
        order = await start(mesh)
        migration_id = await target.accept()
        await target.hear("abort")
        target.say(failed=migration_pb2.MigrationFailed(migration_id=migration_id, reason="dropped"))
        answer = await order
        assert not answer.moved
        await goes_on(mesh)


async def test_a_request_taken_back_while_it_stands_still_ends_here() -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:
        order = await start(mesh)
        migration_id = await target.accept()
        await mesh.abort("a", "r")
        await target.hear("abort")
        target.say(failed=migration_pb2.MigrationFailed(migration_id=migration_id, reason="dropped"))
        answer = await order
        assert not answer.moved
        await mesh.until_ended("r")
        assert mesh.heard["r"].finish_reason == request_pb2.FINISH_REASON_ABORT
        assert mesh.workers["a"].engine.instance.load().kv_blocks_used == 0


@pytest.mark.slow
async def test_another_incarnation_than_the_announced_one_is_not_trusted() -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:
        target.incarnation_id = "another"
        order = await start(mesh)
        answer = await order
        assert not answer.moved
        await goes_on(mesh)


async def test_a_source_that_dies_leaves_nothing_behind() -> None:
    async with running_workers("a") as mesh:
        worker = mesh.workers["a"]
        source = ScriptedSource(worker)
        assert (await source.hello()).hello.instance_id == "a"
        await source.say(offer=offer())
        assert (await source.read()).HasField("accept")
        assert worker.engine.instance.load().kv_blocks_used > 0
        source.lose()
        async with asyncio.timeout(WAIT_S):
            while worker.engine.instance.request_ids:  # noqa: ASYNC110  the end of a socket sets no event here
                await asyncio.sleep(0.01)
        assert worker.engine.instance.load().kv_blocks_used == 0


async def test_what_breaks_a_pull_ends_the_migration_though_its_source_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_workers("a") as mesh:
        worker, source = mesh.workers["a"], ScriptedSource(mesh.workers["a"])
        pulling, go_on = asyncio.Event(), asyncio.Event()

        async def breaks(*_: Any) -> None:
            pulling.set()
            await go_on.wait()
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(worker.engine, "pull", breaks)
        await source.hello()
        await source.say(offer=offer())
        assert (await source.read()).HasField("accept")
        await source.say(final_message=migration_pb2.MigrationFinalMessage(migration_id="m0", block_ids=range(4)))
        await asyncio.wait_for(pulling.wait(), WAIT_S)
        source.lose()
        arrivals = worker.role.coordinator.incoming.manager  # type: ignore[union-attr]
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            while arrivals.running or worker.engine.instance.request_ids:  # noqa: ASYNC110  a socket's end sets no event
                await asyncio.sleep(0.01)
        assert worker.engine.instance.load().kv_blocks_used == 0


@pytest.mark.slow
async def test_an_engine_that_cannot_pause_a_request_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:

        async def breaks(_: str) -> None:
            raise EngineFailed("no pause today")

        monkeypatch.setattr(mesh.workers["a"].engine, "pause", breaks)
        order = await start(mesh)
        offered = await target.hear("offer")
        target.say(accept=migration_pb2.MigrationAccept(migration_id=offered.migration_id))
        first = await target.hear("round")
        target.say(pulled=migration_pb2.MigrationPulled(migration_id=offered.migration_id, number=first.number))
        answer = await order
        assert "no pause today" in answer.reason
        await goes_on(mesh)


async def test_an_engine_that_cannot_resume_a_request_costs_no_place_in_the_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_workers("a") as mesh, scripted_target(mesh.workers["a"]) as target:

        def breaks(_: str) -> None:
            raise EngineFailed("it does not go on")

        order = await start(mesh)
        migration_id = await target.accept()
        monkeypatch.setattr(mesh.workers["a"].engine, "resume", breaks)
        target.say(failed=migration_pb2.MigrationFailed(migration_id=migration_id, reason="blocks torn"))
        answer = await order
        assert answer.reason == "blocks torn"
        coordinator = mesh.workers["a"].role.coordinator
        assert coordinator is not None
        assert coordinator.manager.orders == 0, "its slot is free"
        coordinator.manager.validate()


async def test_too_many_migrations_at_once_are_refused_and_an_unknown_one_has_failed() -> None:
    async with running_workers("a") as mesh:
        source = ScriptedSource(mesh.workers["a"])
        await source.hello()
        possible = ManagerLimits().arriving
        for number in range(possible):
            await source.say(offer=offer(number))
            assert (await source.read()).HasField("accept")
        await source.say(offer=offer(possible))
        assert "under way" in (await source.read()).refuse.reason
        await source.say(offer=offer(0))
        assert (await source.read()).accept.migration_id == "m0", "the same offer again: its answer was lost"
        await source.say(abort=migration_pb2.MigrationAbort(migration_id="never", reason="x"))
        assert (await source.read()).failed.migration_id == "never"
        source.lose()


def offer(number: int = 0) -> migration_pb2.MigrationOffer:
    request = request_pb2.GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=range(10, 60),
        model=MODEL,
        epoch=1,
        sampling=request_pb2.SamplingParams(max_tokens=50, top_p=1, repetition_penalty=1),
    )
    return migration_pb2.MigrationOffer(migration_id=f"m{number}", request=request, frontend_id=FRONTEND)
