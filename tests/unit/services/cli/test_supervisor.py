"""The supervisor starts again whatever ended without its doing, and leaves alone what was drained."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from mesh.membership import Member
from penstock.v1 import member_pb2_grpc, worker_pb2, worker_pb2_grpc
from penstock.v1.member_pb2 import RestartRequest
from services.cli.connection import call
from services.cli.supervisor.launcher import Launched, ProcessSpec, SystemLauncher
from services.cli.supervisor.supervisor import Supervisor

WAIT_S = 20.0
WORKER = ("--store", "embedded:", "--member-id", "w", "--engine", "simulated", "--model", "m", "--model-path", "/none")


class Events:
    """What the supervisor says, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._news.set()

    async def next_line(self) -> str:
        async with asyncio.timeout(WAIT_S):
            while not self.lines:
                self._news.clear()
                await self._news.wait()
        return self.lines.pop(0)


@pytest.fixture
async def events() -> Events:
    return Events()


class Launches(SystemLauncher):
    """Raises `refusals`, each once, before it starts anything."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir)
        self.refusals: list[OSError] = []

    async def launch(self, spec: ProcessSpec) -> Launched:
        if self.refusals:
            raise self.refusals.pop()
        return await super().launch(spec)


@pytest.fixture
def launcher(tmp_path: Path) -> Launches:
    return Launches(tmp_path)


@pytest.fixture
async def supervisor(launcher: Launches, events: Events) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(launcher, events)
    yield supervisor
    supervisor.kill()
    await supervisor.stop()


async def until_log(path: Path, holds: Callable[[str], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not (path.exists() and holds(path.read_text())):  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.02)


async def member_of(log_path: Path, life: int) -> Member:
    """What the process says of itself in its `life`-th life, from its log."""
    await until_log(log_path, lambda text: text.count('"message": "serving"') >= life)
    records = [json.loads(line) for line in log_path.read_text().splitlines() if line.startswith("{")]
    serving = [each for each in records if each["message"] == "serving"][life - 1]
    return Member("worker", "w", serving["incarnation_id"], serving["address"], "")


@pytest.mark.process
async def test_a_killed_worker_comes_back(supervisor: Supervisor, events: Events, tmp_path: Path) -> None:
    await supervisor.add(ProcessSpec("w", "worker", WORKER))
    os.kill(supervisor.pids()["w"], signal.SIGKILL)
    assert "starting it again in 0.5 s" in await events.next_line()
    await member_of(tmp_path / "w.log", 1)


@pytest.mark.process
async def test_a_worker_that_somebody_else_ends_comes_back_and_a_drained_one_stays_away(
    supervisor: Supervisor, events: Events, tmp_path: Path
) -> None:
    await supervisor.add(ProcessSpec("w", "worker", WORKER))
    await member_of(tmp_path / "w.log", 1)
    os.kill(supervisor.pids()["w"], signal.SIGTERM)
    assert "by a signal that was not the supervisor's; starting it again" in await events.next_line()
    member = await member_of(tmp_path / "w.log", 2)
    await call(member, member_pb2_grpc.MemberStub, "Restart", RestartRequest(incarnation_id=member.incarnation_id))
    assert "as `penstock restart` asked; starting it again" in await events.next_line()
    member = await member_of(tmp_path / "w.log", 3)
    await call(member, worker_pb2_grpc.WorkerStub, "Drain", worker_pb2.DrainRequest(migrate=True))
    assert "drained" in await events.next_line()
    assert supervisor.pids() == {}


@pytest.mark.process
async def test_wrong_settings_are_given_up_at_once_with_the_reason(supervisor: Supervisor, events: Events) -> None:
    await supervisor.add(ProcessSpec("w", "worker", (*WORKER, "--engine-arg", "foo=1")))
    async with asyncio.timeout(WAIT_S):
        await supervisor.wait_given_up()
    told = await events.next_line()
    assert "is given up" in told
    assert "'foo' is not a setting here" in told
    assert supervisor.pids() == {}
    assert "'foo' is not a setting here" in supervisor.given_up()["w"]
    await supervisor.remove("w")
    assert supervisor.given_up() == {}
    assert not supervisor.names()


async def test_a_process_that_cannot_be_started_is_none(supervisor: Supervisor) -> None:
    with pytest.raises(OSError, match="no/where"):
        await supervisor.add(ProcessSpec("no/where", "worker", WORKER))
    assert not supervisor.names()


@pytest.mark.process
async def test_a_restart_that_is_refused_is_tried_again(
    supervisor: Supervisor, launcher: Launches, events: Events
) -> None:
    await supervisor.add(ProcessSpec("w", "worker", WORKER))
    launcher.refusals.append(BlockingIOError("too many processes"))
    os.kill(supervisor.pids()["w"], signal.SIGKILL)
    assert "starting it again" in await events.next_line()
    assert "too many processes" in await events.next_line()
    async with asyncio.timeout(WAIT_S):
        while not supervisor.pids():  # noqa: ASYNC110  it starts in the background
            await asyncio.sleep(0.02)
