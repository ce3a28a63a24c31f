"""Ray actors are kept running, drained and replaced by the supervisor of processes: the driver that asks Ray for them
is real, and Ray a fake."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from controlplane.deployment.deployment_status import DeploymentStatus
from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.manager import DeploymentManager, StartInstance
from controlplane.model.autoscale_record import ScaleRecord
from mesh.errors import ConfigurationError, RayError
from mesh.membership import Directory
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from services.cli.carriers import ray_cluster
from services.cli.carriers.carried import checked_carrier
from services.cli.carriers.ray_actor import WorkerActor, WorkerOrder
from services.cli.carriers.ray_cluster import RayCluster, cluster_at
from services.cli.carriers.ray_driver import RayDriver, serve
from services.cli.carriers.ray_launcher import GONE, TERMINATED, RayLauncher, RaySettings, order_of
from services.cli.planning.deployments import deployment_lines, deployment_status
from services.cli.supervisor.deployer import Deployer
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.process_actuator import ProcessActuator
from services.cli.supervisor.supervisor import Supervisor
from tests.unit.services.cli.carriers.fake_ray import FakeRay
from tests.unit.services.operator.mesh_on_cluster import Workers

pytestmark = pytest.mark.live

WAIT_S = 20.0
SETTINGS = RaySettings(
    "m",
    "here",
    {"PENSTOCK_SERVE_WORKER_KV_PORT": "1", "PENSTOCK_IDENTITY": "/secret", "PENSTOCK_PARENT_PID": "9", "PATH": "/"},
)


class FakeWorker:
    """What an actor runs; it ends when the test says so."""

    def __init__(self) -> None:
        self.order: WorkerOrder | None = None
        self.asked: list[str] = []
        self.is_watched = False
        """Whether the launcher knows that it runs: before, what is to end gives its place up and is asked nothing."""
        self._end = asyncio.get_running_loop().create_future()

    def end(self, status: int, reason: str = "") -> None:
        self._end.set_result((status, reason))

    async def start(self, order: WorkerOrder) -> tuple[str, int]:
        self.order = order
        return "10.0.0.7", 42

    async def wait(self, timeout_s: float) -> tuple[int, str] | None:
        self.is_watched = True
        return cast(tuple[int, str], await asyncio.shield(self._end))

    async def terminate(self) -> None:
        self.asked.append("terminate")

    async def kill(self) -> None:
        self.asked.append("kill")
        if not self._end.done():
            self.end(-9)


class DriverHere:
    """A driver as if it were a process: lines go to it and come from it."""

    def __init__(self, ray: Any) -> None:
        self.stdout: asyncio.StreamReader | None = asyncio.StreamReader()
        self._calls = asyncio.StreamReader()
        self.stdin = cast(asyncio.StreamWriter, self)
        self.stdout.feed_data(json.dumps({"host": "10.0.0.1", "gpus": 4}).encode() + b"\n")
        self._serving = asyncio.create_task(serve(RayDriver(ray, "n"), self._calls, cast(Any, self)))
        self._ended = asyncio.Event()

    # -- of its answers, and of the stream to it: the two do not share a method

    def write(self, line: bytes) -> None:
        if b'"call"' in line:
            self._calls.feed_data(line)
        elif self.stdout is not None and not self._ended.is_set():
            self.stdout.feed_data(line)

    def flush(self) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        if not self._ended.is_set():
            self._serving.cancel()
            assert self.stdout is not None
            self.stdout.feed_eof()
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0


class World:
    """A cluster with a node, and a launcher on it."""

    def __init__(self) -> None:
        self.workers: dict[str, list[FakeWorker]] = {}
        self.ray = FakeRay(self._worker, [{"CPU": 4, "GPU": 2}])
        self.drivers: list[DriverHere] = []
        self.said: list[str] = []
        self.cluster = RayCluster("auto", "n", self._driver)
        self.launcher = RayLauncher(self.cluster, SETTINGS, self.said.append)

    def actors(self) -> list[str]:
        return sorted(name.partition("/")[0] for name in self.ray.actors)

    def actor(self, instance: str) -> Any:
        return next(each for name, each in self.ray.actors.items() if name.startswith(f"{instance}/"))

    def runs(self, *instances: str) -> bool:
        """Whether the launcher watches the process of each."""
        return all(self.workers.get(each) and self.workers[each][-1].is_watched for each in instances)

    def _worker(self, name: str) -> FakeWorker:
        self.workers.setdefault(name.partition("/")[0], []).append(made := FakeWorker())
        return made

    async def _driver(self) -> DriverHere:
        self.drivers.append(DriverHere(self.ray))
        return self.drivers[-1]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.cluster.connect()
    yield made
    await made.launcher.close()
    assert not made.ray.actors, "nothing is left"
    await made.cluster.close()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.carriers.ray_launcher.PATIENCE_S", 0.0)
    monkeypatch.setattr("services.cli.carriers.ray_launcher.FIRST_PAUSE_S", 0.001)


def spec(name: str, *arguments: str, gpus: str = "") -> ProcessSpec:
    return ProcessSpec(
        name, "worker", ("--member-id", name, *arguments), {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    )


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  what the cluster does offers nothing to await
            await asyncio.sleep(0.002)


async def test_one_that_dies_is_started_again_and_its_reason_told(world: World) -> None:
    said: list[str] = []
    supervisor = Supervisor(world.launcher, said.append)
    await supervisor.add(spec("a"))
    await until(lambda: world.runs("a"))
    world.workers["a"][0].end(1, "no such model")
    await until(lambda: said)
    assert said == ["a ended (status 1: no such model); starting it again in 0.5 s"]
    await until(lambda: len(world.workers["a"]) == 2)
    world.actor("a").die("The node died.")
    await until(lambda: len(said) == 2)
    assert said[1] == f"a ended (status {GONE}: its Ray actor died: The node died.); starting it again in 1 s"
    supervisor.kill()
    await supervisor.stop()


async def test_exactly_the_chosen_one_is_asked_to_end(world: World) -> None:
    supervisor = Supervisor(world.launcher, print)
    for name in ("a", "b"):
        await supervisor.add(spec(name))
    await until(lambda: world.runs("a", "b"))
    removing = asyncio.create_task(supervisor.remove("a"))
    await until(lambda: world.workers["a"][0].asked == ["terminate"])
    assert not removing.done(), "it drains"
    world.workers["a"][0].end(0)
    await removing
    assert world.actors() == ["b"]
    assert not world.workers["b"][0].asked
    await supervisor.let_go()


async def test_one_that_does_not_end_is_killed(world: World) -> None:
    supervisor = Supervisor(world.launcher, print)
    await supervisor.add(spec("a"))
    await until(lambda: world.runs("a"))
    await supervisor.remove("a", 0.0)
    assert "kill" in world.workers["a"][0].asked


async def test_who_finds_no_place_waits_aloud_and_gets_the_first_that_fits(world: World) -> None:
    process = await world.launcher.launch(spec("a", gpus="0,1,2,3"))
    await until(lambda: process.waits_for)
    why = (
        "no node of the Ray cluster has 4 GPU: its 1 nodes have 2 GPU at most; add a node, or start narrower instances"
    )
    assert process.waits_for == why
    assert world.said == [f"a waits: {why}"], "once"
    world.ray.add_node({"CPU": 1, "GPU": 8})
    await until(lambda: not process.waits_for)
    assert world.actor("a").options["num_gpus"] == 4
    assert process.returncode is None


async def test_one_that_waits_for_a_place_ends_at_once(world: World) -> None:
    process = await world.launcher.launch(spec("a", gpus="0,1,2,3"))
    await until(lambda: world.actors() == ["a"])
    process.terminate()
    assert await process.wait() == TERMINATED
    assert not world.actors()


async def test_an_actor_outlives_the_driver_and_is_found_by_the_next(world: World) -> None:
    process = await world.launcher.launch(spec("a"))
    await until(lambda: world.runs("a"))
    world.ray.unavailable = 1
    world.drivers[0].kill()
    await until(lambda: len(world.drivers) == 2)
    assert world.actors() == ["a"]
    process.terminate()
    await until(lambda: world.workers["a"][0].asked == ["terminate"])
    world.workers["a"][0].end(0)
    assert await process.wait() == process.returncode == 0
    assert len(world.workers["a"]) == 1


async def test_what_a_former_mesh_has_left_is_ended(world: World) -> None:
    await world.launcher.launch(spec("a"))
    await until(lambda: world.actors() == ["a"])
    assert await RayLauncher(world.cluster, SETTINGS, print).sweep() == 1
    assert not world.actors()


async def test_a_cluster_that_never_answers_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def launch() -> DriverHere:
        driver = DriverHere(FakeRay(lambda name: None, []))
        driver.stdout = asyncio.StreamReader()
        return driver

    monkeypatch.setattr(ray_cluster, "CONNECT_S", 0.01)
    with pytest.raises(RayError, match=r"a Ray cluster at ray://far:1 \(it said nothing for .*RAY_ADDRESS names"):
        await RayCluster("ray://far:1", "n", launch).connect()


def test_without_ray_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'penstock\[ray\]'"):
        cluster_at("", "n", tmp_path / "ray.log")


def test_a_carrier_is_one_that_there_is() -> None:
    for good in ("processes", "docker", "ray", "ray://head:10001"):
        assert checked_carrier(good) == good
    for wrong in ("slurm", "ray://head", "ray://:10001", "ray:head:10001", ""):
        with pytest.raises(ConfigurationError, match="ray://HOST:PORT are possible"):
            checked_carrier(wrong)


def test_an_identity_travels_as_files_and_never_in_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(b"private")
    order, gpus = order_of(spec("a", "--identity", str(tmp_path), "--model", "x", gpus="4,5"), SETTINGS)
    assert gpus == 2, "Ray chooses which"
    assert order["arguments"] == ("--member-id", "a", "--model", "x")
    assert order["identity"] == {"key.pem": "cHJpdmF0ZQ=="}
    assert order["environment"] == {"PENSTOCK_SERVE_WORKER_KV_PORT": "1"}, "neither paths of here nor others' secrets"
    assert "private" not in repr(WorkerOrder("a", "worker", (), {}, {"key.pem": b"private"}))


SHOW = """
import os, sys, time
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
key = open(options["--identity"] + "/key.pem").read()
print(sys.argv[1], options["--advertise-host"], key, oct(os.stat(options["--identity"]).st_mode), os.environ["X"])
print(*sorted(name for name in os.environ if name.startswith("RAY_")))
print("Error: it cannot", flush=True)
if options["--then"] == "wait":
    time.sleep(60)
sys.exit(2)
"""


def actor(tmp_path: Path, ends: list[int], orphaned_after_s: float = 60.0) -> WorkerActor:
    command = (sys.executable, "-c", SHOW)
    return WorkerActor(orphaned_after_s, command, lambda: ("10.0.0.7", tmp_path), ends.append)


def order(then: str) -> WorkerOrder:
    name = f"penstock-test-{os.getpid()}-{then}"
    return WorkerOrder(name, "worker", ("--then", then), {"X": "y"}, {"key.pem": b"private"})


@pytest.mark.process
async def test_an_actor_s_process_has_its_identity_and_the_node_s_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "1")
    ours = actor(tmp_path, [])
    host, _ = await ours.start(order("end"))
    assert host == "10.0.0.7"
    assert await ours.wait(WAIT_S) == (2, "it cannot")
    (log,) = tmp_path.glob("*.log")
    assert log.read_text().splitlines()[:2] == ["worker 10.0.0.7 private 0o40700 y", ""]
    (identity,) = Path("/dev/shm").glob(f"penstock-{os.getuid()}-*") or [None]
    await ours.kill()
    assert not identity.exists()


@pytest.mark.process
async def test_an_actor_that_nobody_asks_ends_its_process_and_itself(tmp_path: Path) -> None:
    ends: list[int] = []
    ours = actor(tmp_path, ends, orphaned_after_s=0.3)
    _, pid = await ours.start(order("wait"))
    assert await ours.start(order("wait")) == ("10.0.0.7", pid), "asked twice, it has one process"
    await until(lambda: ends)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    actor(tmp_path, ends, orphaned_after_s=0.01)
    await until(lambda: len(ends) == 2)


async def test_scales_act_on_actors_and_status_tells_who_has_no_place(world: World) -> None:
    """Up by one, which has to wait, then down by one: the one that the record names, when it has drained."""
    supervisor, workers = Supervisor(world.launcher, print), Workers()
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy()))
    pool, running = GpuPool(4), {"chat": dict.fromkeys(("chat-0", "chat-1"), (1, 1))}
    for name in running["chat"]:
        await supervisor.add(spec(name, gpus=pool.take(name, 1)["CUDA_VISIBLE_DEVICES"]))
        workers.join(name)
    manager = DeploymentManager("here", pool, 300.0, running, {"chat": (1, 1)})

    def make_spec(instance: StartInstance) -> ProcessSpec:
        return spec(instance.name, gpus="1,2,3" if instance.name == "chat-2" else "0")

    actuator = ProcessActuator(supervisor, cast(Directory, workers), make_spec)
    deployer = Deployer(manager, store, actuator, 600.0, SystemClock().now_s, print)
    deployer.serve({"chat": (1, 1)}, {"chat": ScaleRecord("chat", 3)})
    await deployer.turn()
    await until(lambda: world.runs("chat-0", "chat-1") and supervisor.waiting())
    status: DeploymentStatus = await deployer.turn()
    assert status.waiting.keys() == {"chat-2"}
    shown = deployment_lines([deployment_status(status)])
    assert shown[0] == "instances of penstock up here: NOT all run"
    assert shown[-1].startswith("  chat-2 waits: no node of the Ray cluster has 3 GPU")
    world.ray.add_node({"GPU": 3})
    await until(lambda: not supervisor.waiting())
    workers.join("chat-2")
    assert (await deployer.turn()).is_reached
    deployer.serve({"chat": (1, 1)}, {"chat": ScaleRecord("chat", 2, ("chat-1",))})
    await deployer.turn()
    await until(lambda: world.workers["chat-1"][0].asked == ["terminate"])
    world.workers["chat-1"][0].end(0)
    await until(lambda: "chat-1" not in supervisor.names())
    workers.leave("chat-1")
    assert world.actors() == ["chat-0", "chat-2"]
    await supervisor.let_go()
    await store.close()
