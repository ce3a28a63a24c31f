"""Signals reach the announced process, and no other."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from mesh.errors import PeerUnavailable
from mesh.membership import Member
from services.cli.chaos.processes import PAGE_BYTES, resident_bytes, send_signal

pytestmark = pytest.mark.live


def worker(pid: int, address: str = "127.0.0.1:7000") -> Member:
    return Member("worker", "w", "1", address, "", {"pid": str(pid)})


async def sleeping(role: str = "worker") -> asyncio.subprocess.Process:
    """With the words of `penstock serve ROLE` in its command."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", "serve", role, stdin=asyncio.subprocess.PIPE
    )


async def test_a_worker_of_another_machine_costs_no_process_of_this_one_its_life() -> None:
    process = await sleeping()
    try:
        # 192.0.2.0/24 is for documentation (RFC 5737): no machine has it.
        with pytest.raises(PeerUnavailable, match="not on this machine"):
            send_signal(worker(process.pid, "192.0.2.1:7000"), signal.SIGKILL)
        assert process.returncode is None
        os.kill(process.pid, 0)
    finally:
        process.kill()
        await process.wait()


async def test_a_worker_in_a_container_costs_no_process_outside_its_life() -> None:
    """Its number there is that of another process here."""
    process = await sleeping("frontend")
    try:
        with pytest.raises(PeerUnavailable, match="is not worker w, which is gone or in a container"):
            send_signal(worker(process.pid), signal.SIGKILL)
        os.kill(process.pid, 0)
    finally:
        process.kill()
        await process.wait()


async def test_a_worker_is_killed() -> None:
    process = await sleeping()
    send_signal(worker(process.pid), signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


async def test_a_process_that_is_gone_is_an_error() -> None:
    process = await sleeping()
    process.kill()
    await process.wait()
    with pytest.raises(PeerUnavailable, match="is gone"):
        send_signal(worker(process.pid), signal.SIGKILL)
    assert resident_bytes(process.pid) == 0


@pytest.mark.process
async def test_the_memory_of_a_process_counts_what_it_has_started() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        alone = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * PAGE_BYTES
        assert resident_bytes(process.pid) > 1.5 * alone
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
