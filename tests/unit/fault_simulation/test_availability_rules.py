"""Requests go on, and do not wait, while single connections of the control plane are cut."""

import asyncio
import random

import pytest

from services.frontend.role import FrontendRole
from services.frontend.workers.liveness import Hang
from tests.unit.fault_simulation.small_mesh import MEMBERS, WORKERS, is_as_expected, oracle, request, send, small_mesh

REQUESTS_S = 5
LONGEST_ANSWER_S = 1.2
"""The longest request takes 0.8 s undisturbed. To wait for a connection, or until the frontend overrules a scheduler
that finds no instance, takes a second more."""


async def ask_for(mesh: object, duration_s: float, rng: random.Random) -> list[float]:
    """Requests at a steady rate, all answered exactly; how long each took."""
    known = oracle()

    async def one(after_s: float) -> float:
        path, body = request(rng)
        expected = known.answer(path, body)
        await asyncio.sleep(after_s)
        began_s = asyncio.get_running_loop().time()
        answer = await send(mesh, path, body)  # type: ignore[arg-type]
        took_s = asyncio.get_running_loop().time() - began_s
        assert is_as_expected(answer, expected), f"status {answer.status}: {answer.error}"
        return took_s

    return list(await asyncio.gather(*(one(number / REQUESTS_S) for number in range(int(duration_s * REQUESTS_S)))))


@pytest.mark.slow
def test_workers_that_are_cut_from_the_monitor_only_are_placed_on_without_a_wait() -> None:
    mesh, rng = small_mesh(11), random.Random(11)

    async def main() -> list[float]:
        for name in MEMBERS:
            mesh.start(name)
        await asyncio.sleep(5)
        for name in WORKERS:
            mesh.network.cut(name, "monitor")
        took_s = await ask_for(mesh, 20.0, rng)
        mesh.kill("monitor")
        mesh.start("monitor")
        took_s += await ask_for(mesh, 20.0, rng)
        for name in WORKERS:
            mesh.network.heal(name, "monitor")
        return took_s + await ask_for(mesh, 5.0, rng)

    took_s = mesh.run(main())
    assert not mesh.loop.findings, "\n".join(map(str, mesh.loop.findings))
    assert max(took_s) < LONGEST_ANSWER_S


@pytest.mark.slow
def test_a_worker_that_the_frontend_cannot_reach_is_not_waited_for() -> None:
    mesh, rng = small_mesh(12), random.Random(12)

    async def main() -> list[float]:
        for name in MEMBERS:
            mesh.start(name)
        await asyncio.sleep(5)
        mesh.network.cut("frontend", "worker-0")
        at_first_s = await ask_for(mesh, 10.0, rng)
        # Its heartbeats go on, and so does the connection, for the 13 s of its keep-alive.
        role = mesh.machines["frontend"].life.role  # type: ignore[union-attr]
        assert isinstance(role, FrontendRole)
        assert role.service is not None
        link = role.service.pool.link("worker-0")
        assert link is not None
        assert (link.hung, link.unheard > 0) == (Hang.DEAF, True)
        return at_first_s + await ask_for(mesh, 30.0, rng)

    took_s = mesh.run(main())
    assert not mesh.loop.findings, "\n".join(map(str, mesh.loop.findings))
    assert max(took_s) < LONGEST_ANSWER_S
