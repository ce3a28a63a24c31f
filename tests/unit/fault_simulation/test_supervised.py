"""`penstock up` in the simulation: its own supervisor and deployer keep simulated processes running."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from fault_simulation.actions import ApplyPlan, RollingRestart, SetCascade
from fault_simulation.nodes import STORE, SimulatedMesh
from fault_simulation.supervised import UpSettings
from services.cli.supervisor.local_mesh import LocalMesh, ModelSpec
from tests.unit.fault_simulation.small_mesh import MODEL, MODEL_PATH, is_as_expected, oracle, request, send

SETTLED_S = 8.0


def supervised(seed: int, *models: ModelSpec) -> SimulatedMesh:
    mesh = SimulatedMesh(seed)
    wanted = models or (ModelSpec(MODEL, MODEL_PATH, 3),)
    mesh.add_supervisor(UpSettings(LocalMesh(wanted, "simulated", (), "", "", 8000, drain_s=10.0)))
    return mesh


def run(mesh: SimulatedMesh, work: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        mesh.start(STORE)
        await asyncio.sleep(SETTLED_S)
        await work

    mesh.run(main())
    assert not mesh.loop.findings, "\n".join(map(str, mesh.loop.findings))


async def exact(mesh: SimulatedMesh, rng: random.Random, requests: int, within_s: float) -> int:
    """How many of some requests are answered as they have to be. As a client behind a balancer, what no frontend takes
    is sent again."""
    known = oracle()

    async def one(after_s: float) -> bool:
        path, body = request(rng)
        await asyncio.sleep(after_s)
        for _ in range(50):
            answer = await send(mesh, path, body)
            if answer.status:
                return is_as_expected(answer, known.answer(path, body))
            await asyncio.sleep(0.2)
        return False

    return sum(await asyncio.gather(*(one(rng.uniform(0, within_s)) for _ in range(requests))))


@pytest.mark.slow
def test_what_is_killed_is_started_again_and_loses_no_request() -> None:
    mesh = supervised(1)

    async def work() -> None:
        answered = asyncio.create_task(exact(mesh, random.Random(1), 20, 12.0))
        for name in ("model-0", "scheduler", "monitor"):
            await asyncio.sleep(2)
            mesh.kill(name)
        mesh.terminate("model-1")
        assert await answered == 20
        await asyncio.sleep(5)
        lives = {name: mesh.machines[name].lives for name in ("model-0", "model-1", "scheduler", "monitor", "planner")}
        assert lives == {"model-0": 2, "model-1": 2, "scheduler": 2, "monitor": 2, "planner": 1}
        assert all(machine.is_up for machine in mesh.machines.values())
        assert mesh.up is not None
        assert any("ended (status -9)" in event for event in mesh.up.events), mesh.up.events

    run(mesh, work())


@pytest.mark.slow
def test_a_supervisor_that_is_killed_takes_all_with_it_and_another_one_starts_them_again() -> None:
    mesh = supervised(2)

    async def work() -> None:
        mesh.kill(STORE)
        await asyncio.sleep(15)
        assert not any(machine.is_up for machine in mesh.machines.values())
        mesh.start(STORE)
        await asyncio.sleep(SETTLED_S)
        assert await exact(mesh, random.Random(2), 5, 1.0) == 5

    run(mesh, work())


@pytest.mark.slow
def test_a_rolling_restart_fails_no_request() -> None:
    mesh = supervised(3)

    async def work() -> None:
        answered = asyncio.create_task(exact(mesh, random.Random(3), 30, 25.0))
        outcome = await mesh.operator.perform(RollingRestart())
        assert outcome.done, outcome
        assert await answered == 30
        processes = [machine for machine in mesh.machines.values() if machine.is_supervised]
        assert len(processes) == 9
        assert all(machine.lives == 2 for machine in processes)

    run(mesh, work())


@pytest.mark.slow
def test_plans_are_followed() -> None:
    mesh = supervised(4, ModelSpec("small", MODEL_PATH, 2), ModelSpec("large", MODEL_PATH, 1))

    async def work() -> None:
        assert (await mesh.operator.perform(SetCascade("both", ("small", "large"), (50.0,)))).done
        outcome = await mesh.operator.perform(ApplyPlan("both", (("small", 1), ("large", 3)), (40.0,)))
        assert outcome.done, outcome
        await asyncio.sleep(20)
        up = sorted(name for name, machine in mesh.machines.items() if machine.is_up)
        assert [name for name in up if name[:5] in ("small", "large")] == ["large-0", "large-1", "large-2", "small-0"]

    run(mesh, work())
