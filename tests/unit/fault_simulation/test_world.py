"""Disks, HTTP, KV transfers and threads of simulated machines."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.settings import KvTransferSettings
from fault_simulation.disk import SimulatedDisk
from fault_simulation.http import SimulatedHttpServer, http_request
from fault_simulation.kv_fabric import SimulatedKvFabric
from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Network
from fault_simulation.node import Node
from fault_simulation.runtime import WallClock, simulated_runtime
from mesh.errors import RpcError, StoreError
from mesh.store.interface import WatchEvent
from mesh.store.journal import Journal
from mesh.tasks import TaskSet
from services.frontend.http.server import abort_connection
from tests.kv.peer import TOKEN


class Machines:
    """A loop, a network and two nodes."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.network = Network(self.loop, "3")
        self.a, self.b = Node("a"), Node("b", 77.0)

    def kill(self, node: Node) -> None:
        self.loop.kill(node)
        self.network.died(node)


def test_what_was_synced_survives_and_the_rest_is_torn() -> None:
    path = Path("/data/store")
    lost = 0
    for seed in range(200):
        rng = random.Random(seed)
        disk = SimulatedDisk(rng)
        journal = Journal(path, disk)
        answered = 0
        for number in range(rng.randrange(1, 6)):
            disk.is_full = rng.random() < 0.3
            try:
                journal.record([WatchEvent("put", f"k{number}", b"v" * 20, number + 1)])
                answered += 1
                kept = f"k{number}"
            except StoreError:
                lost += 1
                continue
            assert kept in journal.entries
        known = dict(journal.entries)
        disk.crash()
        disk.is_full = False
        assert Journal(path, disk).entries == known
    assert lost > 50


async def _app(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    if scope["path"] == "/echo":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-query", scope["query_string"])]})
        await send({"type": "http.response.body", "body": message["body"]})
        assert (await receive())["type"] == "http.disconnect"
    elif scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(64):
            await send({"type": "http.response.body", "body": bytes(16384), "more_body": True})
            scope["state"]["sent"] = number
            _app_sent.append(number)
        await send({"type": "http.response.body", "body": b""})
    elif scope["path"] == "/abort":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        abort_connection(scope)
    else:
        raise ValueError("no such path")


_app_sent: list[int] = []


def test_http() -> None:
    machines = Machines()
    loop, network = machines.loop, machines.network
    _app_sent.clear()

    async def main() -> None:
        server = SimulatedHttpServer(network, machines.b, _app, "b", 0)
        tasks = TaskSet("http")
        with pytest.raises(ConnectionError, match="refused"):
            await http_request(network, machines.a, server.address, "POST", "/echo", {}).started()
        server.start(tasks, lambda _: None)
        answer = http_request(network, machines.a, server.address, "POST", "/echo?a=1", {}, b"hello")
        assert await answer.started() == 200
        assert answer.headers == {"x-query": "a=1"}
        assert await answer.body() == b"hello"
        answer = http_request(network, machines.a, server.address, "GET", "/bug", {})
        assert await answer.started() == 500
        # A client that does not read holds the server up.
        answer = http_request(network, machines.a, server.address, "GET", "/stream", {})
        assert await answer.started() == 200
        await asyncio.sleep(5)
        assert 2 <= len(_app_sent) <= 8
        assert len(await answer.body()) == 64 * 16384
        # One that leaves does not.
        _app_sent.clear()
        answer = http_request(network, machines.a, server.address, "GET", "/stream", {})
        await answer.started()
        answer.leave()
        await asyncio.sleep(5)
        assert len(_app_sent) == 64
        answer = http_request(network, machines.a, server.address, "GET", "/abort", {})
        await answer.started()
        with pytest.raises(ConnectionError, match="reset"):
            await answer.body()
        answer = http_request(network, machines.a, server.address, "GET", "/stream", {})
        await answer.started()
        machines.kill(machines.b)
        with pytest.raises(ConnectionError, match="reset"):
            await answer.body()
        with pytest.raises(ConnectionError, match="refused"):
            await http_request(network, machines.a, server.address, "GET", "/stream", {}).started()

    loop.run(main())
    assert not loop.findings


def _agent(machines: Machines, node: Node, seed: int) -> tuple[KvTransferAgent, Any]:
    regions = [np.random.default_rng([seed, n]).integers(0, 256, (64, 4096), np.uint8) for n in range(2)]
    memory = RegionMemory(regions, model="m", dtype="uint8", block_tokens=4)
    runtime = simulated_runtime(machines.network, node, WallClock(), node.name)
    agent = KvTransferAgent(
        memory,
        KvTransferSettings(),
        runtime.clock,
        runtime.entropy,
        agent_id=node.name,
        make_fabric=lambda _: SimulatedKvFabric(machines.network, node, node.name),
    )
    return agent, regions


@pytest.mark.parametrize("fault", ["none", "kill", "cut", "pause"])
def test_kv_blocks_move_between_real_agents(fault: str) -> None:
    machines = Machines()
    loop, network = machines.loop, machines.network

    async def serve() -> int:
        agent, _ = source
        port = await agent.start()
        agent.export("move", range(64), TOKEN)
        return port

    async def pull(port: int) -> None:
        agent, regions = target
        await agent.start()
        peer = PeerAddress("a", port, (), TOKEN)
        await agent.pull(peer, "move", range(32), range(8, 40), 5.0)
        for ours, theirs in zip(regions, source[1], strict=True):
            assert (ours[8:40] == theirs[:32]).all()
        began_s = loop.now_s
        if fault != "none":
            pulling = asyncio.ensure_future(agent.pull(peer, "move", range(64), range(64), 20.0))
            await asyncio.sleep(0.0005)
            if fault == "kill":
                machines.kill(machines.a)
            elif fault == "pause":
                loop.pause(machines.a)
            else:
                network.cut("a", "b")
            with pytest.raises(RpcError):
                await pulling
            assert loop.now_s - began_s < (0.1 if fault == "kill" else 5.0)
            loop.resume(machines.a)
            network.heal_all()
        if fault == "cut":
            await agent.pull(peer, "move", range(32), range(8, 40), 5.0)
        await agent.stop()

    async def main() -> None:
        port = await loop.spawn(machines.a, serve(), "source")
        await loop.spawn(machines.b, pull(port), "target")
        if fault != "kill":
            await loop.spawn(machines.a, source[0].stop(), "stop")

    source, target = _agent(machines, machines.a, 1), _agent(machines, machines.b, 2)
    loop.run(main())
    assert not loop.findings


def test_threads_do_not_stop_and_die_with_their_process() -> None:
    machines = Machines()
    loop = machines.loop
    done: list[str] = []
    runtime = simulated_runtime(machines.network, machines.a, WallClock(), "seed")

    async def main() -> None:
        assert await runtime.threads.run(lambda x: x + 1, 1) == 2
        with pytest.raises(ZeroDivisionError):
            await runtime.threads.run(lambda: 1 / 0)
        waiting = asyncio.ensure_future(runtime.threads.run(done.append, "ran"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(1)
        assert done == ["ran"]
        loop.spawn(machines.a, runtime.threads.run(done.append, "never"), "work")
        await asyncio.sleep(0)
        machines.kill(machines.a)
        await asyncio.sleep(1)

    loop.run(main())
    loop.close()
    assert done == ["ran"]
