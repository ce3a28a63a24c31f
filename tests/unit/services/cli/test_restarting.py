"""Members are restarted one at a time, each once the mesh is as whole as before."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from mesh.announcement import Announcement
from mesh.errors import ConfigurationError, DeadlineExceeded, PeerUnavailable
from mesh.exit_status import ExitStatus
from mesh.member_service import MemberService
from mesh.membership import Directory, Member
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, SystemEntropy
from mesh.shutdown import Shutdown
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from penstock.v1 import member_pb2, member_pb2_grpc
from services.cli.restart import chosen
from services.cli.restarting import RestartTimeouts, in_rolling_order, is_lone_worker, missing, restart, restart_in_turn

pytestmark = pytest.mark.live

WAIT_S = 20.0
LONG = RestartTimeouts(drain_s=None, start_s=WAIT_S)


async def no_metrics(_: str) -> list[member_pb2.MetricFamily]:
    return []


class Process:
    """A process of a role with nothing in it, and a supervisor that starts it again, unless it `stays_away`."""

    def __init__(self, store: EmbeddedStore, role: str, member_id: str, model: str) -> None:
        self._store = store
        self._role = role
        self._member_id = member_id
        self._attributes = {"model": model} if model else {}
        self.stays_away = False
        self.serves = True
        self.endings: list[Shutdown] = []

    async def run(self) -> None:
        while not (self.endings and self.stays_away):
            incarnation_id = f"life {len(self.endings)}"
            ending = Shutdown()
            self.endings.append(ending)
            server = RpcServer(GrpcTransport())
            service = MemberService(
                self._role, self._member_id, incarnation_id, 30.0, ending, supervised=False, metrics=no_metrics
            )
            server.add(member_pb2_grpc.add_MemberServicer_to_server, service, "penstock.v1.Member")
            await server.start()
            await server.set_serving(self.serves)
            member = Member(self._role, self._member_id, incarnation_id, server.address, "", self._attributes)
            announcement = Announcement(self._store, member)
            try:
                await announcement.start()
                await ending.asked.wait()
                await announcement.withdraw()
            finally:
                await server.stop(0.1)


class Mesh:
    """Processes of a test, and the directory that a command has."""

    def __init__(self, store: EmbeddedStore, directory: Directory, stack: AsyncExitStack) -> None:
        self._store = store
        self._stack = stack
        self.directory = directory
        self.said: list[str] = []

    async def run(self, role: str, member_id: str, model: str = "") -> Process:
        process = Process(self._store, role, member_id, model)
        task = asyncio.create_task(process.run())
        self._stack.callback(task.cancel)
        await self.directory.wait_for(role, len(self.directory.members(role)) + 1, WAIT_S)
        return process

    def member(self, role: str, member_id: str) -> Member:
        (found,) = (member for member in self.directory.members(role) if member.member_id == member_id)
        return found


@asynccontextmanager
async def _mesh() -> AsyncIterator[Mesh]:
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy()))
    directory = Directory(store)
    await directory.start()
    async with AsyncExitStack() as stack:
        yield Mesh(store, directory, stack)
    await directory.stop()


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with _mesh() as mesh:
        yield mesh


async def test_a_restart_ends_when_the_next_incarnation_serves(mesh: Mesh) -> None:
    process = await mesh.run("planner", "p")
    done = await restart(mesh.directory, mesh.member("planner", "p"), LONG, mesh.said.append)
    assert (done.member_id, done.former_incarnation_id, done.incarnation_id) == ("p", "life 0", "life 1")
    assert process.endings[0].status is ExitStatus.RESTART
    assert not process.endings[1].asked.is_set()
    assert any("not run by `penstock up`" in line for line in mesh.said), "nobody is known to start it again"


async def test_a_process_that_stays_away_is_an_error_and_ends_the_turn(mesh: Mesh) -> None:
    first, second = await mesh.run("monitor", "a"), await mesh.run("monitor", "b")
    first.stays_away = True
    members, patience = mesh.directory.members("monitor"), RestartTimeouts(drain_s=0.0, start_s=0.3)
    with pytest.raises(DeadlineExceeded, match="monitor a has not joined the mesh again"):
        await restart_in_turn(mesh.directory, members, patience, mesh.said.append)
    assert not second.endings[0].asked.is_set(), "the rest is left alone"


async def test_one_that_joins_without_serving_is_an_error(mesh: Mesh) -> None:
    process = await mesh.run("cascade", "c")
    process.serves = False
    patience = RestartTimeouts(drain_s=0.0, start_s=0.5)
    with pytest.raises(DeadlineExceeded, match="cascade c does not serve"):
        await restart(mesh.directory, mesh.member("cascade", "c"), patience, mesh.said.append)


async def test_what_was_missing_before_is_not_waited_for(mesh: Mesh) -> None:
    await mesh.run("planner", "p")
    # It answers neither as a scheduler nor places on the worker: that is no fault of the planner's restart.
    await mesh.run("scheduler", "s")
    assert await missing(mesh.directory) == {"scheduler s does not answer"}
    done = await restart(mesh.directory, mesh.member("planner", "p"), LONG, mesh.said.append)
    assert done.incarnation_id == "life 1"


async def test_the_only_worker_of_a_model_is_not_waited_for(mesh: Mesh) -> None:
    lone, first = await mesh.run("worker", "lone", "small"), await mesh.run("worker", "a", "large")
    await mesh.run("worker", "b", "large")
    await restart_in_turn(
        mesh.directory, [mesh.member("worker", "lone"), mesh.member("worker", "a")], LONG, mesh.said.append
    )
    assert (lone.endings[0].drain_s, first.endings[0].drain_s) == (0.0, 30.0)
    assert any("lone is the only worker of small" in line for line in mesh.said)
    await restart(mesh.directory, mesh.member("worker", "lone"), RestartTimeouts(7.0, WAIT_S), mesh.said.append)
    assert lone.endings[1].drain_s == 7.0, "an operator knows better"


async def test_who_left_before_its_turn_is_passed_over(mesh: Mesh) -> None:
    await mesh.run("planner", "p")
    gone = Member("monitor", "gone", "1", "127.0.0.1:1", "")
    done = await restart_in_turn(mesh.directory, [gone, mesh.member("planner", "p")], LONG, mesh.said.append)
    assert [each.member_id for each in done] == ["p"]


async def test_a_name_has_to_mean_one_member(mesh: Mesh) -> None:
    await mesh.run("monitor", "a")
    await mesh.run("scheduler", "a")
    with pytest.raises(ConfigurationError, match="say which with --role"):
        chosen(mesh.directory, "a", None)
    with pytest.raises(PeerUnavailable, match="there are: a, a"):
        chosen(mesh.directory, "b", None)
    assert [each.role for each in chosen(mesh.directory, "a", "monitor")] == ["monitor"]
    assert [each.role for each in chosen(mesh.directory, None, None)] == ["monitor", "scheduler"]


def test_workers_go_before_frontends_and_after_the_control_plane() -> None:
    members = [
        Member(role, name, "1", "", "")
        for role, name in (("frontend", "f"), ("worker", "b"), ("worker", "a"), ("scheduler", "s"), ("monitor", "m"))
    ]
    assert [member.member_id for member in in_rolling_order(members)] == ["m", "s", "a", "b", "f"]


def test_a_lone_worker_is_lone_in_its_model() -> None:
    small = Member("worker", "a", "1", "", "", {"model": "small"})
    large = Member("worker", "b", "1", "", "", {"model": "large"})
    assert is_lone_worker(small, [small, large])
    assert not is_lone_worker(small, [small, large, Member("worker", "c", "1", "", "", {"model": "small"})])
    assert not is_lone_worker(Member("frontend", "f", "1", "", ""), [])
