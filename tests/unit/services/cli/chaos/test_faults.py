"""Faults reach the announced process, and no other."""

import asyncio
import os
import signal
import sys

import pytest

from mesh.errors import PeerUnavailable
from mesh.membership import Member
from services.cli.chaos.faults import inject, woken_at_the_end


def worker(pid: int, address: str = "127.0.0.1:7000") -> Member:
    return Member("worker", "w", "1", address, "", {"pid": str(pid)})


async def sleeping() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)


async def test_a_worker_of_another_machine_costs_no_process_of_this_one_its_life() -> None:
    process = await sleeping()
    try:
        # 192.0.2.0/24 is for documentation (RFC 5737): no machine has it.
        with pytest.raises(PeerUnavailable, match="not on this machine"):
            await inject("kill", worker(process.pid, "192.0.2.1:7000"))
        assert process.returncode is None
        os.kill(process.pid, 0)
    finally:
        process.kill()
        await process.wait()


async def test_a_worker_is_killed() -> None:
    process = await sleeping()
    await inject("kill", worker(process.pid))
    assert await process.wait() == -signal.SIGKILL


async def test_a_stopped_worker_that_died_meanwhile_spoils_no_report() -> None:
    process = await sleeping()
    victim = worker(process.pid)
    with woken_at_the_end("hang", [victim]):
        await inject("hang", victim)
        process.kill()
        await process.wait()
    with pytest.raises(PeerUnavailable, match="is gone"):
        await inject("kill", victim)
