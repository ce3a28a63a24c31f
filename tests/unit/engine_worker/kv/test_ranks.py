"""Agents of several ranks, each a process of its own, on a simulated network: blocks move between unlike shapes, and a
rank that fails ends the pull that needs it, and no other."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.layout import Region
from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.settings import KvTransferSettings
from fault_simulation.kv_fabric import SimulatedKvFabric
from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Network
from fault_simulation.node import Node, NodeState
from fault_simulation.runtime import WallClock, simulated_runtime
from mesh.errors import KvBlockCorrupt, KvTransferRefused, PenstockError, RpcError
from tests.kv.peer import TOKEN

BLOCKS, LAYERS, HEADS, HEAD_BYTES = 64, 2, 4, 512
DEADLINE_S = 5.0


class Rank:
    """One process of an instance, with its share of the heads."""

    def __init__(self, network: Network, instance: str, rank: int, ranks: int) -> None:
        self.node = Node(f"{instance}{rank}")
        heads = HEADS // ranks
        self.arrays = [
            np.zeros((BLOCKS, heads * HEAD_BYTES), np.uint8) if instance == "target" else content(layer, rank, ranks)
            for layer in range(LAYERS)
        ]
        self.memory = RegionMemory(
            self.arrays,
            model="m",
            dtype="uint8",
            block_tokens=4,
            named=[Region(f"layer {layer}", rank * heads, heads, 1, HEAD_BYTES) for layer in range(LAYERS)],
            rank=rank,
            ranks=ranks,
        )
        runtime = simulated_runtime(network, self.node, WallClock(), self.node.name)
        self.agent = KvTransferAgent(
            self.memory,
            KvTransferSettings(),
            runtime.clock,
            runtime.entropy,
            agent_id=self.node.name,
            make_fabric=lambda _: SimulatedKvFabric(network, self.node, instance),
        )


def content(layer: int, rank: int, ranks: int) -> np.ndarray:
    """Of this rank's heads, by the layer's content over all heads."""
    whole = np.random.default_rng(layer).integers(1, 256, (BLOCKS, HEADS * HEAD_BYTES), np.uint8)
    return whole.reshape(BLOCKS, ranks, -1)[:, rank].copy()


class Instances:
    """A source and a target of any number of ranks."""

    def __init__(self, sources: int, targets: int) -> None:
        self.loop = VirtualLoop()
        self.network = Network(self.loop, "3")
        self.sources = [Rank(self.network, "source", rank, sources) for rank in range(sources)]
        self.bystander = Rank(self.network, "bystander", 0, 1)
        self.targets = [Rank(self.network, "target", rank, targets) for rank in range(targets)]
        self.peer = self.bystanding_peer = PeerAddress("", 0)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            ports = [await self._on(rank, rank.agent.start()) for rank in self.sources]
            self.peer = PeerAddress("source", ports[0], tuple(ports[1:]), TOKEN)
            port = await self._on(self.bystander, self.bystander.agent.start())
            self.bystanding_peer = PeerAddress("bystander", port, (), TOKEN)
            for rank in (*self.sources, self.bystander):
                await self._on(rank, _exported(rank))
            for rank in self.targets:
                await self._on(rank, rank.agent.start())
            await scenario()
            for rank in (*self.sources, self.bystander, *self.targets):
                if rank.node.state is not NodeState.DEAD:
                    await self._on(rank, rank.agent.stop())

        self.loop.run(main())
        assert not self.loop.findings

    async def pull(self, rank: int, peer: PeerAddress | None = None) -> None:
        target, blocks = self.targets[rank], range(BLOCKS)
        await self._on(target, target.agent.pull(peer or self.peer, "move", blocks, blocks, DEADLINE_S))

    def has(self, rank: int) -> bool:
        ranks = len(self.targets)
        return all((self.targets[rank].arrays[layer] == content(layer, rank, ranks)).all() for layer in range(LAYERS))

    async def _on(self, rank: Rank, work: Coroutine[Any, Any, Any]) -> Any:
        return await self.loop.spawn(rank.node, work, rank.node.name)


async def _exported(rank: Rank) -> None:
    rank.agent.export("move", range(BLOCKS), TOKEN)


@pytest.mark.parametrize(("sources", "targets"), [(1, 1), (2, 2), (4, 2), (2, 4), (1, 4), (4, 1)])
def test_each_rank_pulls_its_heads_from_whoever_has_them(sources: int, targets: int) -> None:
    instances = Instances(sources, targets)

    async def scenario() -> None:
        await asyncio.gather(*(instances.pull(rank) for rank in range(targets)))
        assert all(instances.has(rank) for rank in range(targets))

    instances.run(scenario)


@pytest.mark.parametrize("fault", ["refuses", "hangs", "dies", "sends wrong bytes"])
def test_a_rank_that_fails_ends_the_pull_within_its_deadline_and_harms_nobody_else(fault: str) -> None:
    instances = Instances(4, 2)
    failing = instances.sources[1]
    errors: dict[str, type[PenstockError]] = {"refuses": KvTransferRefused, "sends wrong bytes": KvBlockCorrupt}

    async def scenario() -> None:
        began_s = instances.loop.now_s
        match fault:
            case "refuses":
                await instances._on(failing, failing.agent.withdraw("move"))
            case "hangs":
                instances.loop.pause(failing.node)
            case "dies":
                instances.loop.kill(failing.node)
                instances.network.died(failing.node)
            case "sends wrong bytes":
                failing.memory.host_bytes = lambda buffer: memoryview(bytes(len(buffer)))  # type: ignore[method-assign]
        other = asyncio.ensure_future(instances.pull(1, instances.bystanding_peer))
        with pytest.raises(errors.get(fault, RpcError)):
            await instances.pull(0)
        assert instances.loop.now_s - began_s <= DEADLINE_S + 1.0
        await other
        assert instances.has(1)
        instances.loop.resume(failing.node)

    instances.run(scenario)


def test_agents_that_are_not_all_ranks_of_one_instance_are_refused() -> None:
    instances = Instances(2, 1)

    async def scenario() -> None:
        first, second = instances.peer.ranks
        for peer in (first, PeerAddress(second.host, second.port, (first.port,), TOKEN)):
            instances.peer = peer
            with pytest.raises(KvTransferRefused, match="was it started anew"):
                await instances.pull(0)

    instances.run(scenario)
