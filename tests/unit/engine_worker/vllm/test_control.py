"""Who may order a server about that runs by itself: one worker at a time, which knows the token, until it leaves or
falls silent."""

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine_worker.engines.vllm.connector.bridge import CoreBridge
from engine_worker.engines.vllm.connector.channel import CoreChannel
from engine_worker.engines.vllm.connector.control import SILENT_S, ServedControl
from engine_worker.engines.vllm.connector.endpoint import check_endpoint
from engine_worker.engines.vllm.connector.inbox import Sent, Unexported, Unheld
from engine_worker.engines.vllm.connector.messages import (
    Answer,
    Attach,
    Beat,
    Command,
    Detach,
    EndedInstead,
    ExpectPause,
    Export,
    FreeBlocks,
    Notice,
)
from engine_worker.engines.vllm.connector.settings import connector_settings
from engine_worker.engines.vllm.connector.staging import StagingTable
from mesh.errors import ConfigurationError, KvTransferRefused
from tests.still_clock import StillClock


class Server:
    """The end of a server's engine core, which counts its blocks."""

    def __init__(self, endpoint: str, token: str = "") -> None:
        self.clock = StillClock()
        self.left = 0
        self.commands: list[Command] = []
        self.control = ServedControl(endpoint, token, "secret", self.clock, self._leave)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            call = await self.control.receive()
            self.commands.append(call.command)
            await self.control.send(Answer(call.number, 7))

    def _leave(self) -> None:
        self.left += 1

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.control.close()


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(f"ipc://{tmp_path}/control", "open sesame")
    yield server
    await server.close()


@pytest.mark.live
async def test_one_worker_at_a_time_which_knows_the_token(server: Server, tmp_path: Path) -> None:
    endpoint, heard = f"ipc://{tmp_path}/control", list[Notice]()
    assert stat.S_IMODE((tmp_path / "control").stat().st_mode) == 0o600
    first, second = (CoreChannel(endpoint, heard.append, connects=True) for _ in range(2))
    async with asyncio.timeout(20):
        with pytest.raises(KvTransferRefused, match="not attached"):
            await first.call(FreeBlocks())
        with pytest.raises(ConfigurationError, match="PENSTOCK_ATTACH_CONTROL_TOKEN"):
            await first.call(Attach("a guess"))
        assert await first.call(Attach("open sesame")) == "secret"
        assert await first.call(FreeBlocks()) == 7
        server.clock.at_s += SILENT_S - 1
        assert not server.control.has_fallen_silent()
        with pytest.raises(KvTransferRefused, match=r"last heard 9\.0 s ago"):
            await second.call(Attach("open sesame"))
        await first.call(Beat())
        server.clock.at_s += SILENT_S - 1
        assert not server.control.has_fallen_silent(), "it has beaten since"
        server.clock.at_s += 1
        assert server.control.has_fallen_silent()
        assert not server.control.has_fallen_silent(), "it is said once"
        with pytest.raises(KvTransferRefused, match="given up"):
            await first.call(Beat())
        assert await second.call(Attach("open sesame")) == "secret"
        await server.control.send(EndedInstead("r"))
        await second.call(Detach())
        assert server.left == 1
        assert heard == [EndedInstead("r")], "and only who is attached hears of requests"
    for channel in (first, second):
        await channel.close()


@pytest.mark.live
async def test_commands_arrive_in_the_order_in_which_they_are_given(server: Server, tmp_path: Path) -> None:
    """An export that came behind its pause would find the request gone."""
    channel = CoreChannel(f"ipc://{tmp_path}/control", lambda notice: None, connects=True)
    async with asyncio.timeout(20):
        await channel.call(Attach("open sesame"))
        channel.send(export := Export("r", "m", "token"))
        await channel.call(pause := ExpectPause("r"))
        assert server.commands == [export, pause]
    await channel.close()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:7000", "tcp://*:7000", "ipc://", "inproc://here", "7000"])
def test_no_other_machine_reaches_it(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="no control endpoint"):
        check_endpoint(endpoint, "token")


def test_a_port_wants_a_token() -> None:
    check_endpoint("tcp://127.0.0.1:7000", "token")
    with pytest.raises(ConfigurationError, match="set PENSTOCK_ATTACH_CONTROL_TOKEN"):
        check_endpoint("tcp://127.0.0.1:7000", "")


def test_the_servers_flags_are_few_and_checked() -> None:
    about: dict[str, Any] = {"model": "/models/chat", "device": "cpu", "is_spread": False, "token": ""}
    settings = connector_settings({"control": "ipc:///run/c", "kv_port": "7300"}, **about)
    assert (settings.endpoint, settings.listens, settings.port, settings.model) == ("ipc:///run/c", True, 7300, "chat")
    second = settings.of_core(1, ranks=2)
    assert (second.endpoint, second.port) == ("ipc:///run/c_dp1", 7304)
    spread = about | {"is_spread": True, "token": "t"}
    assert connector_settings({"control": "ipc:///run/c"}, **spread).listens
    with pytest.raises(ConfigurationError, match="ipc:///PATH"):
        connector_settings({"control": "tcp://127.0.0.1:7000"}, **spread)
    with pytest.raises(ConfigurationError, match="kv_prot"):
        connector_settings({"control": "ipc:///run/c", "kv_prot": 1}, **about)


def test_requests_of_other_clients_are_not_ours() -> None:
    bridge, own = CoreBridge("ipc:///nowhere", listens=True), CoreBridge("ipc:///nowhere")
    stolen = {"load_id": "x", "peer": "203.0.113.1:7", "peer_block_ids": [1], "secret": ""}
    for parameters in (stolen, {"request_id": "r"}, {"secret": None}, "secret", 5):
        assert not bridge.is_ours(parameters)
    assert bridge.is_ours({"request_id": "r", "secret": bridge._secret})
    assert own.is_ours({"request_id": "r"})
    for each in (bridge, own):
        each._loop.close()


async def test_a_pause_of_a_request_that_is_not_here_is_not_kept() -> None:
    bridge = CoreBridge("ipc:///nowhere", listens=True)
    assert await bridge._carry_out(ExpectPause("gone")) == ""
    assert not bridge.pauses
    bridge.internal_id = lambda request_id: "cmpl-r-1-0-abcdefgh" if "r" in bridge.pauses else ""
    assert await bridge._carry_out(ExpectPause("r")), "it is expected before it is looked for"
    assert bridge.pauses == {"r"}
    bridge._loop.close()


class Agent:
    """Of blocks that peers may read until they are withdrawn."""

    def __init__(self) -> None:
        self.withdrawn: list[str] = []

    async def withdraw(self, export_id: str) -> None:
        self.withdrawn.append(export_id)


async def test_what_a_worker_held_is_let_go_with_it() -> None:
    bridge, agent = CoreBridge("ipc:///nowhere", listens=True), Agent()
    bridge._loop.close()
    bridge._loop = asyncio.get_running_loop()
    bridge._agent = agent  # type: ignore[assignment]
    bridge._staging = staging = StagingTable(range(4))
    assert staging.take("arriving", 0, 3)
    bridge.pauses.add("a")
    bridge.holds["prefix"] = "token"
    bridge._exports.update({"leaving": "token", "paused's": "token"})
    bridge._held["paused"] = ["paused's"]
    captures: list[int] = []
    bridge.capture = lambda every_steps: str(captures.append(every_steps) or "")
    bridge._let_all_go()
    await asyncio.gather(*bridge._tasks)
    assert sorted(set(agent.withdrawn)) == ["leaving", "paused's", "prefix"]
    assert not any((bridge.pauses, bridge.holds, bridge._exports, bridge._held, staging.holders))
    assert {Sent("paused"), Unheld("prefix"), Unexported("leaving")} <= set(bridge.inbox)
    assert captures == [0]
