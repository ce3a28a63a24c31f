"""Pulls between two processes on one machine."""

import asyncio
import random

import pytest

from tests.kv.peer import TOKEN
from tests.kv.peer_process import BLOCKS, LocalAgent, peer_process

ALL = range(BLOCKS)
DEADLINE_S = 20.0


async def test_blocks_arrive_whichever_they_are() -> None:
    choose = random.Random(5)
    async with peer_process() as peer, LocalAgent() as agent:
        await peer.export("m1", ALL)
        for count in (1, 7, 200, BLOCKS):
            for shuffle in ("none", "source", "target", "both"):
                start = choose.randrange(BLOCKS - count + 1)
                source = choose.sample(ALL, count) if shuffle in ("source", "both") else range(start, start + count)
                target = choose.sample(ALL, count) if shuffle in ("target", "both") else range(count)
                agent.clear()
                stats = await agent.pull(peer.address, "m1", source, target, DEADLINE_S)
                assert agent.has(peer, source, target), (count, shuffle)
                assert stats.nbytes == count * 40 * 1024


@pytest.mark.parametrize(
    "settings",
    [
        {"window_messages": 1, "message_bytes": 16 * 1024, "gathered_bytes": 16 * 1024, "direct_bytes": 16 * 1024},
        {"window_messages": 9, "message_bytes": 50_000, "gathered_bytes": 40_000, "direct_bytes": 30_000},
        {"checksums": True},
        {"spin_us": 0.0},
    ],
)
async def test_other_settings(settings: dict[str, float]) -> None:
    target = random.Random(1).sample(ALL, 200)
    async with peer_process(**settings) as peer, LocalAgent(**settings) as agent:
        await peer.export("m1", ALL)
        await agent.pull(peer.address, "m1", range(200), target, DEADLINE_S)
        assert agent.has(peer, range(200), target)


async def test_more_runs_than_one_message_names() -> None:
    blocks = 10_000
    scattered = random.Random(2).sample(range(blocks), blocks)
    sizes = {"blocks": blocks, "region_bytes": [64]}
    async with peer_process(**sizes) as peer, LocalAgent(**sizes) as agent:
        await peer.export("m1", range(blocks))
        await agent.pull(peer.address, "m1", range(blocks), scattered, DEADLINE_S)
        assert agent.has(peer, range(blocks), scattered)


async def test_one_connection_serves_many_pulls() -> None:
    async with peer_process() as peer, LocalAgent() as agent:
        await peer.export("m1", ALL)
        for _ in range(5):
            await agent.pull(peer.address, "m1", ALL, ALL, DEADLINE_S)
        status = await agent.status()
        assert (status.connections, status.pulls_total) == (1, 5)
        assert status.pulled_bytes_total == 5 * BLOCKS * 40 * 1024
        assert (await peer.tell(do="status"))["connections"] == 1


async def test_both_directions_at_once() -> None:
    async with peer_process() as peer, LocalAgent() as agent:
        half = BLOCKS // 2
        await peer.export("m1", range(half))
        agent.export("m2", range(half, BLOCKS), TOKEN)
        zeros = agent.regions[0][half:].copy()
        theirs, ours = await asyncio.gather(
            peer.tell(
                do="pull",
                host="127.0.0.1",
                port=agent.port,
                id="m2",
                source=list(range(half, BLOCKS)),
                target=list(range(half, BLOCKS)),
                deadline_s=DEADLINE_S,
            ),
            agent.pull(peer.address, "m1", range(half), range(half), DEADLINE_S),
        )
        assert theirs["blocks"] == ours.blocks == half
        assert agent.has(peer, range(half), range(half))
        assert (agent.regions[0][half:] == zeros).all()
        await peer.export("m3", ALL)
        async with LocalAgent() as third:  # what was written there is what was zero here
            await third.pull(peer.address, "m3", ALL, ALL, DEADLINE_S)
            assert not third.regions[0][half:].any()
            assert (third.regions[0][:half] == peer.regions[0][:half]).all()


async def test_idle_agents_take_no_cpu() -> None:
    async with peer_process() as peer, LocalAgent() as agent:
        await peer.export("m1", ALL)
        await agent.pull(peer.address, "m1", ALL, ALL, DEADLINE_S)
        before = await peer.tell(do="cpu")
        await asyncio.sleep(1.0)
        assert await peer.tell(do="cpu") - before < 0.05
