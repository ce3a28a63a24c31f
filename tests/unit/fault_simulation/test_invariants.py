"""Each invariant is shown to fail: something is spoilt on purpose in a mesh that is otherwise left in peace."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from controlplane.policies.stages.neighbours import StageReport
from engine_worker.coordinator.stages.wire import stage_message
from fault_simulation.client import ReceivedAnswer
from fault_simulation.flaws import flaws
from fault_simulation.nodes import SimulatedMesh
from fault_simulation.oracle import COMPLETIONS_PATH, ExpectedChoice
from fault_simulation.run import build, run_timeline
from fault_simulation.timeline import MODEL, Request, Timeline, Topology
from fault_simulation.workload import Asked, Attempt
from mesh.exit_status import ExitStatus
from mesh.leadership_state import Phase

DURING_S, AFTER_S = 8.0, 42.5


def peaceful() -> Timeline:
    """One long answer, and one request later on."""
    body = {"model": MODEL, "max_tokens": 200, "ignore_eos": True, "temperature": 0.0, "stream": True}
    requests = (
        Request(0, 6.0, COMPLETIONS_PATH, {**body, "prompt": "one"}),
        Request(1, 9.0, COMPLETIONS_PATH, {**body, "prompt": "two", "max_tokens": 8}),
    )
    return Timeline(1, Topology(schedulers=2), requests, ())


def role(mesh: SimulatedMesh, name: str) -> Any:
    return mesh.role(name)


def end_all(mesh: SimulatedMesh) -> None:
    role(mesh, "frontend-0").service.end_all()


def abort(mesh: SimulatedMesh) -> None:
    for exchange in list(role(mesh, "frontend-0")._http._exchanges):
        exchange.abort()


def close_port(mesh: SimulatedMesh) -> None:
    role(mesh, "frontend-0")._http._listener.close()


def own_twice(mesh: SimulatedMesh) -> None:
    instances = [role(mesh, name).instance for name in ("worker-0", "worker-1")]
    owner = next(instance for instance in instances if len(instance.table))
    other = next(instance for instance in instances if instance is not owner)
    mesh.network.cut(other.description.instance_id, "frontend-0")  # which would have one of them stop at once
    tracked = next(iter(owner.table))
    stream = next(iter(other.streams.values()))
    other.submit(stream, tracked.request, model=MODEL, epoch=tracked.epoch)


def lead_twice(mesh: SimulatedMesh) -> None:
    duties = [role(mesh, name).leaderships[0] for name in ("scheduler-0", "scheduler-1")]
    leading = next(duty for duty in duties if duty.is_leading)
    for duty in duties:
        duty.candidate.phase, duty.candidate.epoch = Phase.LEADING, leading.epoch
        duty.candidate._held_until_s = 1e9
        duty._lease = None


def overfill(mesh: SimulatedMesh) -> None:
    role(mesh, "frontend-0").service.room._waiting[MODEL] = 100_000


def end(mesh: SimulatedMesh) -> None:
    life = mesh.machines["monitor-0"].life
    assert life is not None
    life.shutdown.ask(ExitStatus.FAILED)


def log_error(mesh: SimulatedMesh) -> None:
    try:
        raise ValueError("spoilt")
    except ValueError:
        logging.getLogger("spoilt").exception("a bug")


def forget_member(mesh: SimulatedMesh) -> None:
    life = mesh.machines["worker-0"].life
    assert life is not None
    assert life.context is not None
    life.context.directory._members.clear()


def keep_request(mesh: SimulatedMesh) -> None:
    role(mesh, "frontend-0").service.running["kept"] = None


def keep_task(mesh: SimulatedMesh) -> None:
    life = mesh.machines["worker-0"].life
    assert life is not None
    mesh.loop.spawn(life.node, asyncio.sleep(1000.0), "kept")


def speak_twice(mesh: SimulatedMesh) -> None:
    """Forget a stage stream that is open, and open another."""
    life = mesh.machines["worker-0"].life
    assert life is not None
    worker = role(mesh, "worker-0")
    links = worker.stages._links

    async def speak() -> None:
        await worker.coordinator.peers.known()  # what is said to a worker that is not known yet, is dropped
        for _ in range(2):
            links.send("worker-1", stage_message(StageReport(0, None, ())))
            links._outboxes.clear()

    mesh.loop.spawn(life.node, speak(), "speak")


def keep_export(mesh: SimulatedMesh) -> None:
    role(mesh, "worker-0").engine.kv_agent().export("kept", [1], "0" * 32)


def forget_admissions(mesh: SimulatedMesh) -> None:
    for name in ("worker-0", "worker-1"):
        role(mesh, name).instance.table.admissions_total = 0


def remember_the_gone(mesh: SimulatedMesh) -> None:
    role(mesh, "scheduler-0").placements.feed.table.immovable.add("gone")


def never_probe(mesh: SimulatedMesh) -> None:
    for link in role(mesh, "frontend-0").service.placement.links():
        link.breaker._probed_s = -float("inf")


def stay_away(mesh: SimulatedMesh) -> None:
    mesh.pause("frontend-0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_s", "spoil", "kind"),
    [
        (DURING_S, end_all, "failed request"),
        (DURING_S, abort, "broken connection"),
        (DURING_S, close_port, "refused connection"),
        (DURING_S, own_twice, "two owners"),
        (DURING_S, lead_twice, "two deciders"),
        (DURING_S, overfill, "out of bounds"),
        (DURING_S, end, "process ended"),
        (DURING_S, log_error, "finding: logged an error: a bug"),
        (DURING_S, stay_away, "endless request"),
        (DURING_S, forget_admissions, "broken state"),
        (DURING_S, remember_the_gone, "broken state"),
        (DURING_S, never_probe, "broken state"),
        (AFTER_S, forget_member, "missing member"),
        (AFTER_S, keep_request, "left on a frontend"),
        (AFTER_S, keep_export, "left on a worker"),
        (AFTER_S, speak_twice, "left on a worker"),
        (AFTER_S, keep_task, "left task"),
        (38.5, stay_away, "new request not served"),
    ],
)
def test_an_invariant_can_fail(at_s: float, spoil: Callable[[SimulatedMesh], None], kind: str) -> None:
    timeline = peaceful()
    mesh = build(timeline)
    mesh.loop.call_in_at(mesh.loop.world, at_s, spoil, mesh)
    assert kind in run_timeline(timeline, mesh).kinds


@pytest.mark.slow
def test_a_drain_may_not_stand_still() -> None:
    only = peaceful().requests[0]
    request = msgspec.structs.replace(only, body={**only.body, "max_tokens": 400})
    timeline = Timeline(1, Topology(), (request,), ())
    mesh = build(timeline)

    def drain_without_moving() -> None:
        instances = [role(mesh, name).instance for name in ("worker-0", "worker-1")]
        next(instance for instance in instances if len(instance.table)).start_draining()

    mesh.loop.call_in_at(mesh.loop.world, 6.5, drain_without_moving)
    assert "drain stands still" in run_timeline(timeline, mesh).kinds


@pytest.mark.slow
def test_a_frontend_that_is_given_no_time_to_drain_may_fail_its_requests_at_once() -> None:
    timeline = peaceful()
    mesh = build(timeline)

    def restart() -> None:
        life = mesh.machines["frontend-0"].life
        assert life is not None
        life.shutdown.ask(ExitStatus.RESTART, 0.0)

    mesh.loop.call_in_at(mesh.loop.world, DURING_S + 0.03, restart)  # between two samples
    assert run_timeline(timeline, mesh).violations == ()


def test_a_mesh_in_peace_violates_nothing() -> None:
    assert run_timeline(peaceful()).violations == ()


def asked(text: str, tokens: int, *spelled: str) -> Asked:
    request = Request(0, 0.0, COMPLETIONS_PATH, {})
    return Asked(request, (ExpectedChoice(text, "stop", tokens, 100.0, spelled),))


def attempt(text: str, finish: str, error: str, tokens: int | None) -> Attempt:
    answer = ReceivedAnswer(status=200, error=error, completion_tokens=tokens)
    answer.choices[0].text, answer.choices[0].finish = text, finish
    return Attempt("frontend-0", None, 0.0, answer)


@pytest.mark.parametrize(
    ("text", "finish", "error", "tokens", "is_flawed"),
    [
        ("to be or not", "stop", "", 4, False),
        ("to be or", "stop", "", 4, True),
        ("to be or not not", "stop", "", 4, True),
        ("to be", "", "cut off", None, False),
        ("to see", "", "cut off", None, True),
        ("to be or not", "length", "", 4, True),
        ("to be or not", "stop", "", 5, True),
    ],
)
def test_an_answer_is_exact_or_its_beginning(
    text: str, finish: str, error: str, tokens: int | None, is_flawed: bool
) -> None:
    assert bool(flaws(asked("to be or not", 4), attempt(text, finish, error, tokens))) == is_flawed


def test_a_choice_that_is_missing_is_a_flaw() -> None:
    empty = Attempt("frontend-0", None, 0.0, ReceivedAnswer(status=200))
    assert flaws(asked("to be or not", 4), empty)
