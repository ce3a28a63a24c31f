"""An agent whose fabric is of no more use opens another, or says why no block can be moved."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from engine_worker.kv.agent import DOUBT_S, LONGEST_PAUSE_S, KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.devices import Device, changes, ipv4_devices, lost
from engine_worker.kv.fabric import KvEndpoint, KvListener
from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.transfer import AgentStatus
from fault_simulation.loop import VirtualLoop
from mesh.errors import ConfigurationError, KvTransferRefused, PeerUnavailable
from mesh.runtime import SystemClock, SystemEntropy

pytestmark = pytest.mark.live

WAIT_S = 20.0


class Machine:
    """Where fabrics are made, with its devices and ports."""

    def __init__(self) -> None:
        self.devices = "first"
        self.obstacle = ""
        self.jam = ""
        self.asked_for_jams_s: list[float] = []
        self.refuses = ""
        self.taken: set[int] = set()
        self.refused_s: list[float] = []
        self.fabrics: list[Fabric] = []

    def make(self, settings: KvTransferSettings) -> "Fabric":
        if self.refuses:
            self.refused_s.append(asyncio.get_running_loop().time())
            raise RuntimeError(self.refuses)
        self.fabrics.append(Fabric(self))
        return self.fabrics[-1]


class Fabric:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._devices = machine.devices
        self._number = len(machine.fabrics)
        self.port = 0
        self.closed = False

    def listen(self, port: int, accept: Callable[[KvEndpoint], None]) -> KvListener:
        if port in self._machine.taken:
            raise ConfigurationError(f"port {port} is taken")
        self.port = port or 7000 + len(self._machine.fabrics)
        return self

    async def connect(self, host: str, port: int) -> KvEndpoint:
        raise PeerUnavailable("nobody is there")

    def staleness(self) -> str:
        return "" if self._devices == self._machine.devices else "the network device eth0 was made anew"

    async def jam(self) -> str:
        self._machine.asked_for_jams_s.append(asyncio.get_running_loop().time())
        return self._machine.jam if self._number == 0 else ""

    def obstacle(self) -> str:
        return self._machine.obstacle

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def machine() -> Machine:
    return Machine()


async def started(machine: Machine, probe_s: float = 0.01) -> KvTransferAgent:
    memory = RegionMemory([np.zeros((4, 16), np.uint8)], model="m", dtype="uint8", block_tokens=16)
    settings = KvTransferSettings(probe_s=probe_s)
    agent = KvTransferAgent(memory, settings, SystemClock(), SystemEntropy(), agent_id="a", make_fabric=machine.make)
    await agent.start()
    return agent


async def until(agent: KvTransferAgent, holds: Callable[[AgentStatus], bool]) -> AgentStatus:
    async with asyncio.timeout(WAIT_S):
        while not holds(status := await agent.status()):  # noqa: ASYNC110  nothing here sets an event
            await asyncio.sleep(0.001)
    return status


async def test_a_stale_fabric_is_replaced_on_the_same_port(machine: Machine) -> None:
    agent = await started(machine)
    port = agent.port
    machine.devices = "second"
    status = await until(agent, lambda status: status.reopened_total == 1)
    assert (status.port, status.obstacle, agent.port) == (port, "", port)
    assert [fabric.closed for fabric in machine.fabrics] == [True, False]
    await agent.stop()
    assert machine.fabrics[-1].closed


async def test_a_port_that_cannot_be_had_again_is_another_one_then(machine: Machine) -> None:
    agent = await started(machine)
    machine.taken.add(agent.port)
    machine.devices = "second"
    status = await until(agent, lambda status: status.reopened_total == 1)
    assert status.port == agent.port == 7002
    assert (await agent.describe()).port == 7002
    await agent.stop()


async def test_one_that_cannot_be_opened_says_why_and_tries_on(machine: Machine) -> None:
    agent = await started(machine)
    machine.refuses, machine.devices = "no devices", "second"
    await until(agent, lambda status: "cannot be opened anew: no devices" in status.obstacle)
    with pytest.raises(KvTransferRefused, match="no devices"):
        await agent.pull(PeerAddress("there", 1), "m", [0], [0], WAIT_S)
    machine.refuses = ""
    status = await until(agent, lambda status: not status.obstacle)
    assert status.reopened_total == 1
    await agent.stop()


def test_attempts_to_open_anew_become_rare(machine: Machine) -> None:
    async def ten_minutes() -> None:
        agent = await started(machine, probe_s=1.0)
        machine.refuses, machine.devices = "no devices", "second"
        await asyncio.sleep(600.0)
        await agent.stop()

    VirtualLoop().run(ten_minutes())
    pauses_s = [after - before for before, after in pairwise(machine.refused_s)]
    assert pauses_s[:5] == pytest.approx([2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S])
    assert set(pauses_s[5:]) == {LONGEST_PAUSE_S}


async def test_an_obstacle_that_no_other_fabric_would_remove_is_told_and_closes_nothing(machine: Machine) -> None:
    agent = await started(machine)
    machine.obstacle, machine.devices = "UCX reads routes but once", "second"
    status = await until(agent, lambda status: bool(status.obstacle))
    assert status.obstacle == "UCX reads routes but once"
    assert not machine.fabrics[0].closed, "connections to old peers go on"
    assert status.reopened_total == 0
    machine.obstacle = ""
    await until(agent, lambda status: status.reopened_total == 1 and not status.obstacle)
    await agent.stop()


async def test_a_failed_attempt_to_connect_is_looked_into_at_once(machine: Machine) -> None:
    # It would look by itself only after the test's patience.
    agent = await started(machine, probe_s=10 * WAIT_S)
    machine.obstacle = "UCX reads routes but once"
    with pytest.raises(PeerUnavailable):
        await agent.pull(PeerAddress("there", 1), "m", [0], [0], WAIT_S)
    await until(agent, lambda status: bool(status.obstacle))
    await agent.stop()


def test_a_jam_is_looked_for_in_doubt_and_not_for_each_request(machine: Machine) -> None:
    async def a_minute() -> None:
        agent = await started(machine, probe_s=1.0)
        await asyncio.sleep(30.0)
        assert not machine.asked_for_jams_s
        for _ in range(300):
            with pytest.raises(PeerUnavailable):
                await agent.pull(PeerAddress("there", 1), "m", [0], [0], WAIT_S)
            await asyncio.sleep(0.1)
        await agent.stop()

    VirtualLoop().run(a_minute())
    assert 25 <= len(machine.asked_for_jams_s) <= 30
    assert machine.asked_for_jams_s[0] == pytest.approx(30.0 + DOUBT_S)


def test_a_jammed_fabric_is_replaced(machine: Machine) -> None:
    async def look() -> AgentStatus:
        agent = await started(machine, probe_s=1.0)
        machine.jam = "a peer died as it sent"
        with pytest.raises(PeerUnavailable):
            await agent.pull(PeerAddress("there", 1), "m", [0], [0], WAIT_S)
        await asyncio.sleep(10.0)
        status = await agent.status()
        await agent.stop()
        return status

    status = VirtualLoop().run(look())
    assert (status.reopened_total, status.obstacle, status.port) == (1, "", 7001)
    assert [fabric.closed for fabric in machine.fabrics] == [True, True]


ETH, OTHER = Device(2, "10.0.0.1", is_up=True), Device(9, "10.0.0.1", is_up=True)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"eth0": ETH}, ""),
        ({"eth0": Device(2, "10.0.0.1", is_up=False)}, ""),
        ({}, ""),
        ({"eth0": Device(9, "10.0.0.1", is_up=False)}, ""),
        ({"eth0": OTHER}, "the network device eth0 was made anew"),
        ({"eth0": Device(2, "10.0.0.2", is_up=True)}, "eth0 had the address 10.0.0.1 and has 10.0.0.2"),
        ({"eth0": ETH, "eth1": OTHER}, "the network device eth1 is new"),
        ({"eth0": ETH, "eth1": Device(9, "10.0.1.1", is_up=False)}, ""),
    ],
)
def test_what_a_change_of_devices_is(now: dict[str, Device], said: str) -> None:
    found = changes({"eth0": ETH}, now)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"eth0": Device(2, "10.0.0.2", is_up=False)}, ""),
        ({}, "the network device eth0 is gone"),
        ({"eth0": OTHER}, "the network device eth0 was made anew"),
        ({"eth0": Device(9, "10.0.0.1", is_up=False)}, "the network device eth0 was made anew"),
    ],
)
def test_what_the_loss_of_a_device_is(now: dict[str, Device], said: str) -> None:
    assert lost({"eth0": ETH}, now) == said


def test_a_device_that_was_down_is_missed_by_nobody() -> None:
    down = {"eth0": Device(2, "10.0.0.1", is_up=False)}
    assert changes(down, {}) == lost(down, {}) == ""
    assert "is new" in changes(down, {"eth0": ETH})


def test_the_devices_of_this_machine_can_be_read() -> None:
    found = ipv4_devices()
    assert "lo" not in found
    assert all(device.index > 0 and device.address.count(".") == 3 for device in found.values())
