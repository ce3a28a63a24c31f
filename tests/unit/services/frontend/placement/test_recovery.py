"""Requests outlive their worker: another one goes on behind the tokens that the client has."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.protocols.ownership import EPOCHS_PER_RECOVERY
from penstock.v1 import request_pb2, scheduler_pb2, worker_pb2
from tests.unit.services.frontend.fakes import Delta, FakeWorker, Script, failure
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = pytest.mark.live

BODY: Any = {"model": "demo", "prompt": "hi", "max_tokens": 40, "temperature": 0}
TRUTH = [70 + index % 20 for index in range(40)]


def deltas(start: int, end: int, emitted: int = 0) -> list[Delta]:
    """One token each; the fortieth ends the request."""
    made = [Delta(offset=index, token_ids=[TRUTH[index]]) for index in range(start, end)]
    if end == len(TRUTH):
        made[-1].finish_reason = request_pb2.FINISH_REASON_LENGTH
    return made


def goes_on(request: request_pb2.GenerateRequest) -> list[Delta]:
    """As a greedy engine would, behind the emitted tokens."""
    emitted = list(request.emitted_token_ids)
    assert emitted == TRUTH[: len(emitted)]
    return deltas(len(emitted), len(TRUTH))


def stops_after(tokens: int) -> Script:
    """Hangs there."""
    return lambda request: deltas(0, tokens) if not request.emitted_token_ids else goes_on(request)


def first_then_others(place: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse:
    """worker-0 unless it is excluded."""
    chosen = "worker-1" if "worker-0" in place.excluded_instance_ids else "worker-0"
    placed = scheduler_pb2.PLACE_OUTCOME_PLACED
    return scheduler_pb2.PlaceResponse(outcome=placed, instance_id=chosen, policy="fake")


async def two_workers(mesh: MeshOfFakes, first: Script, second: Script = goes_on) -> tuple[FakeWorker, FakeWorker]:
    mesh.scheduler.choose = first_then_others
    one = await mesh.add_worker(first, step_s=0.002)
    return one, await mesh.add_worker(second, step_s=0.002, instance_id="worker-1")


async def ask(mesh: MeshOfFakes, **fields: Any) -> Any:
    """The whole answer and the instance it began on."""
    raw = await mesh.client().completions.with_raw_response.create(**{**BODY, **fields})
    return raw.parse(), raw.headers["x-penstock-instance"]


async def undisturbed(model_path: Path, **fields: Any) -> Any:
    async with mesh_of_fakes(model_path, goes_on) as mesh:
        return (await ask(mesh, **fields))[0]


def emitted(mesh: MeshOfFakes) -> int:
    return sum(len(relay.emitted_token_ids) for one in mesh.service.running.values() for relay in one.relays)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"n": 3}])
async def test_a_request_survives_the_death_of_its_worker(model_path: Path, fields: Any) -> None:
    expected = await undisturbed(model_path, **fields)
    async with mesh_of_fakes(model_path) as mesh:
        one, two = await two_workers(mesh, stops_after(10))
        asking = asyncio.create_task(ask(mesh, **fields))
        choices = fields.get("n", 1)
        await mesh.until(lambda: emitted(mesh) == 10 * choices)
        await one.stop()
        answer, instance = await asking
        assert mesh.metric("dead_workers_total") == 1
        assert [choice.text for choice in answer.choices] == [choice.text for choice in expected.choices]
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * choices
        assert answer.usage == expected.usage
        assert instance == "worker-0", "the first one"
        assert {(again.epoch, len(again.emitted_token_ids), again.sampling.max_tokens) for again in two.received} == {
            (EPOCHS_PER_RECOVERY, 10, 40)
        }
        assert mesh.metric("recoveries_total", reason="worker_lost") == choices
        await mesh.until(lambda: any(not ended.ok and ended.reason == "worker_lost" for ended in mesh.scheduler.ended))


async def test_a_placement_names_who_decodes_and_a_recovery_says_that_the_request_decodes(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        one, two = await two_workers(mesh, stops_after(10))

        def apart(place: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse:
            response = first_then_others(place)
            if not place.is_decoding:
                response.decode_instance_id = "worker-1"
            return response

        mesh.scheduler.choose = apart
        asking = asyncio.create_task(ask(mesh))
        await mesh.until(lambda: emitted(mesh) == 10)
        await one.stop()
        await asking
        assert [place.is_decoding for place in mesh.scheduler.placed] == [False, True]
        assert [request.decode_instance_id for request in one.received] == ["worker-1"]
        assert [request.decode_instance_id for request in two.received] == [""]


async def test_stop_strings_are_found_across_a_recovery(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        one, two = await two_workers(mesh, stops_after(10))
        stop = mesh.text.decode(TRUTH[8:13])
        asking = asyncio.create_task(ask(mesh, stop=[stop]))
        await mesh.until(lambda: emitted(mesh) == 10)
        await one.stop()
        answer, _ = await asking
        assert answer.choices[0].text == mesh.text.decode(TRUTH[:8])
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 13)
        await two.wait_until(lambda: len(two.aborted) == 1)


async def test_what_a_draining_worker_refuses_goes_elsewhere(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        draining = [failure(request_pb2.ERROR_CODE_UNAVAILABLE, "draining")]
        await two_workers(mesh, lambda _: [*deltas(0, 3), *draining])
        answer, _ = await ask(mesh)
        assert answer.usage.completion_tokens == 40
        assert mesh.metric("recoveries_total", reason="unavailable") == 1


async def test_recoveries_are_bounded(model_path: Path) -> None:
    nobody = [failure(request_pb2.ERROR_CODE_UNAVAILABLE, "full")]
    settings = {"max_recoveries": 2, "instance_wait_s": 0.0}
    async with mesh_of_fakes(model_path, lambda _: nobody, **settings) as mesh, mesh.http() as http:
        response = await http.post("/v1/completions", json=BODY)
        assert response.status_code == 503
        assert [request.epoch for request in mesh.worker.received] == [0, EPOCHS_PER_RECOVERY, 2 * EPOCHS_PER_RECOVERY]
        assert mesh.metric("failed_recoveries_total", reason="unavailable") == 1


async def test_the_only_worker_may_come_back_in_time(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, connect_wait_s=0.05) as mesh:
        worker = await mesh.add_worker(stops_after(10))
        asking = asyncio.create_task(ask(mesh))
        await mesh.until(lambda: emitted(mesh) == 10)
        await worker.stop()
        mesh.directory.leave(worker.member(str(model_path)))
        await mesh.add_worker(goes_on, incarnation_id="second")
        answer, _ = await asking
        assert answer.usage.completion_tokens == 40


async def test_workers_that_refuse_at_once_have_a_moment_to_make_room(model_path: Path) -> None:
    """As while the former lives of the request are being dropped."""
    has_room = asyncio.Event()

    def refuses_for_now(request: request_pb2.GenerateRequest) -> list[Delta]:
        if has_room.is_set():
            return goes_on(request)
        asyncio.get_running_loop().call_later(0.1, has_room.set)
        return [failure(request_pb2.ERROR_CODE_UNAVAILABLE, "being dropped")]

    async with mesh_of_fakes(model_path, refuses_for_now) as mesh:
        answer, _ = await ask(mesh)
        assert answer.usage.completion_tokens == 40
        assert mesh.metric("recoveries_total", reason="unavailable") <= 3


async def test_a_request_that_cannot_be_recovered_leaves_nothing_behind(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, instance_wait_s=0.05, connect_wait_s=0.05) as mesh, mesh.http() as http:
        worker = await mesh.add_worker(stops_after(10))
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await mesh.until(lambda: emitted(mesh) == 10)
        await worker.stop()
        assert (await asking).status_code == 502
        assert mesh.metric("failed_recoveries_total", reason="worker_lost") == 1
        assert len(mesh.service.pool.relays) == 0


async def test_a_recovery_that_breaks_fails_its_request(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh_of_fakes(model_path) as mesh, mesh.http() as http:
        one, _ = await two_workers(mesh, stops_after(10))
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await mesh.until(lambda: emitted(mesh) == 10)

        async def breaks(request: scheduler_pb2.PlaceRequest) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(mesh.service.placement, "place", breaks)
        await one.stop()
        async with asyncio.timeout(5):
            assert (await asking).status_code == 502


async def test_a_choice_that_its_client_has_had_enough_of_is_not_placed_again(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a stop string is found in what the lost worker said last, while the other choices go on."""
    async with mesh_of_fakes(model_path) as mesh:
        one, two = await two_workers(mesh, stops_after(10))
        asking = asyncio.create_task(ask(mesh, n=2))
        await mesh.until(lambda: emitted(mesh) == 20)
        (generation,) = mesh.service.running.values()
        place, asked, go_on = mesh.service.placement.place, list[str](), asyncio.Event()

        async def slow(request: scheduler_pb2.PlaceRequest) -> Any:
            asked.append(request.request_id)
            await go_on.wait()
            return await place(request)

        monkeypatch.setattr(mesh.service.placement, "place", slow)
        await one.stop()
        await mesh.until(lambda: len(asked) == 2)
        _, second = generation.relays
        generation.abort_choice(0)
        go_on.set()
        await mesh.until(lambda: second.finished)
        assert [request.request_id for request in two.received] == [second.request_id]
        assert mesh.metric("recoveries_total", reason="worker_lost") == 1
        asking.cancel()


async def never() -> worker_pb2.LoadReport:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def heartbeat(stalled_ms: int) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat(stalled_ms=stalled_ms))


@pytest.mark.slow
@pytest.mark.parametrize("hang", ["frozen", "stalled"])
async def test_a_worker_that_hangs_loses_its_requests(model_path: Path, hang: str) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        one, _ = await two_workers(mesh, stops_after(10))
        one.load, one.beats = never, False
        asking = asyncio.create_task(ask(mesh))
        await mesh.until(lambda: emitted(mesh) == 10)
        if hang == "stalled":
            one.say(heartbeat(stalled_ms=11_000))
        answer, _ = await asking
        assert answer.usage.completion_tokens == 40
        assert mesh.metric("hung_workers_total", hang=hang) == 1
        assert mesh.metric("dead_workers_total") == 0
        assert mesh.metric("worker_losses_total", reason="worker_hung") == 1
        assert mesh.metric("recoveries_total", reason="worker_hung") == 1
        await one.wait_until(lambda: len(one.aborted) == 1)
        link = mesh.service.pool.link("worker-0")
        assert link is not None
        assert not link.is_connected, "and gets nothing new"
        one.say(heartbeat(stalled_ms=12_000))
        if hang == "frozen":
            await mesh.until(lambda: link.is_connected)
            return
        seen = link.messages
        await mesh.until(lambda: link.messages > seen)
        assert not link.is_connected, "its process lives, but its engine does not"
        one.say(worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(deltas=deltas(10, 12))))
        await mesh.until(lambda: link.is_connected)


@pytest.mark.slow
@pytest.mark.parametrize("answers_probes", [True, False])
async def test_a_worker_that_is_busy_with_others_keeps_its_requests(model_path: Path, answers_probes: bool) -> None:
    """For longer than both bounds; without probes it is the heartbeats that tell."""
    async with mesh_of_fakes(model_path, freeze_s=0.4, stall_s=1.0) as mesh:
        one, two = await two_workers(mesh, stops_after(10))
        one.load = None if answers_probes else never
        asking = asyncio.create_task(ask(mesh))
        await mesh.until(lambda: emitted(mesh) == 10)
        for _ in range(6 if answers_probes else 30):
            await asyncio.sleep(0.25 if answers_probes else 0.05)
            one.say(heartbeat(stalled_ms=300))
        assert two.received == []
        rest = deltas(10, 40)
        for delta in rest:
            delta.request_id = one.received[0].request_id
        one.say(worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(deltas=rest)))
        assert (await asking)[0].usage.completion_tokens == 40
        assert (
            mesh.metric("hung_workers_total", hang="frozen") == mesh.metric("hung_workers_total", hang="stalled") == 0
        )


def handed_off(request_id: str, at: int) -> list[Delta]:
    """What a target sends."""
    made = deltas(at, len(TRUTH))
    made[0].emitted_token_ids.extend(TRUTH[:at])
    for delta in made:
        delta.request_id, delta.epoch = request_id, 1
    return made


def moved(request_id: str) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(
        moved=worker_pb2.RequestMoved(request_id=request_id, instance_id="worker-1", incarnation_id="first", epoch=1)
    )


def say_tail(worker: FakeWorker, tail: list[Delta]) -> None:
    worker.say(worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(deltas=tail)))


def target_first(one: FakeWorker, two: FakeWorker, request_id: str) -> None:
    say_tail(two, handed_off(request_id, 12))
    tail = deltas(10, 12)
    for delta in tail:
        delta.request_id = request_id
    say_tail(one, tail)
    one.say(moved(request_id))


def source_first(one: FakeWorker, two: FakeWorker, request_id: str) -> None:
    one.say(moved(request_id))
    say_tail(two, handed_off(request_id, 10))


def tail_is_lost(one: FakeWorker, two: FakeWorker, request_id: str) -> None:
    say_tail(two, handed_off(request_id, 12))


@pytest.mark.slow
@pytest.mark.parametrize("news", [source_first, target_first, tail_is_lost])
async def test_a_request_that_moves_goes_on_in_the_same_stream(
    model_path: Path, news: Callable[[FakeWorker, FakeWorker, str], None]
) -> None:
    expected = await undisturbed(model_path)
    async with mesh_of_fakes(model_path) as mesh:
        one, two = await two_workers(mesh, stops_after(10))
        asking = asyncio.create_task(ask(mesh))
        await mesh.until(lambda: emitted(mesh) == 10)
        news(one, two, one.received[0].request_id)
        answer, _ = await asking
        assert answer.choices[0].text == expected.choices[0].text
        assert answer.usage == expected.usage
        assert two.received == []
        assert mesh.metric("recoveries_total", reason="worker_lost") == 0


async def test_a_client_that_leaves_is_followed_to_where_its_request_moved(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        one, two = await two_workers(mesh, stops_after(10))
        asking = asyncio.create_task(ask(mesh))
        await mesh.until(lambda: emitted(mesh) == 10)
        request_id = one.received[0].request_id
        asking.cancel()
        await one.wait_until(lambda: one.aborted == [request_id])
        say_tail(two, handed_off(request_id, 10)[:1])
        await two.wait_until(lambda: two.aborted == [request_id])


async def test_a_request_that_is_bounced_goes_elsewhere_and_no_failure_is_counted(model_path: Path) -> None:
    bounced = failure(request_pb2.ERROR_CODE_BOUNCED, "9000 prompt tokens wait here")
    bounced.error.present.queued_prefill_tokens, bounced.error.present.requests = 9000, 7

    def choose(place: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse:
        response = first_then_others(place)
        if place.HasField("bounced_by"):
            response.instance_id = "worker-1"
        response.belief.queued_prefill_tokens, response.belief.new_prefill_tokens = 40, 12
        response.belief.may_bounce = True
        return response

    async with mesh_of_fakes(model_path) as mesh:
        one, two = await two_workers(mesh, lambda _: [bounced])
        mesh.scheduler.choose = choose
        answer, _ = await ask(mesh)
        assert answer.choices[0].finish_reason == "length"
        assert [request.belief.may_bounce for request in (*one.received, *two.received)] == [True, True]
        assert one.received[0].belief.queued_prefill_tokens == 40
        asked = mesh.scheduler.placed[-1]
        assert (asked.bounced_by.instance_id, asked.bounced_by.present.queued_prefill_tokens) == ("worker-0", 9000)
        assert not asked.excluded_instance_ids
        assert mesh.metric("bounces_total") == 1
        assert mesh.metric("recoveries_total", reason="bounced") == 0


async def test_choices_of_one_prompt_stay_together_and_one_that_nobody_will_keep_is_kept_at_last(
    model_path: Path,
) -> None:
    bounced = failure(request_pb2.ERROR_CODE_BOUNCED, "much waits here")

    def choose(place: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse:
        response = first_then_others(place)
        response.belief.new_prefill_tokens, response.belief.may_bounce = 12, True
        return response

    async with mesh_of_fakes(model_path) as mesh:
        one, _ = await two_workers(mesh, lambda request: [bounced] if request.belief.may_bounce else goes_on(request))
        mesh.scheduler.choose = choose
        await ask(mesh, n=2)
        assert [(each.belief.may_bounce, each.belief.new_prefill_tokens) for each in one.received] == [
            (False, 12),
            (False, 0),
        ]
        one.received.clear()
        answer, _ = await ask(mesh)
        assert answer.choices[0].finish_reason == "length"
        assert [each.belief.may_bounce for each in one.received] == [True, True, True, False]
