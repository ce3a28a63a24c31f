"""What is not done, or not at once."""

import asyncio
from dataclasses import replace

import pytest

from mesh.errors import KvBlockCorrupt, KvTransferRefused
from tests.kv.peer_process import BLOCKS, LocalAgent, peer_process

ALL = range(BLOCKS)
DEADLINE_S = 20.0


async def test_three_at_once_the_others_wait_and_more_are_refused() -> None:
    async with peer_process(read_ms=2.0) as peer, LocalAgent(queued_transfers=2) as agent:
        await peer.export("m1", ALL)
        pulls = [
            asyncio.create_task(agent.pull(peer.address, "m1", [4 * n + 2, 4 * n], [4 * n, 4 * n + 2], DEADLINE_S))
            for n in range(6)
        ]
        await asyncio.sleep(0)
        status = await agent.status()
        assert (status.pulling, status.pull_queue) == (3, 2)
        done = await asyncio.gather(*pulls, return_exceptions=True)
        assert isinstance(done[5], KvTransferRefused)
        assert "3 KV transfers run and 2 wait" in str(done[5])
        source = [block for n in range(5) for block in (4 * n + 2, 4 * n)]
        target = [block for n in range(5) for block in (4 * n, 4 * n + 2)]
        assert agent.has(peer, source, target)


async def test_a_busy_source_serves_in_turn() -> None:
    async with peer_process(read_ms=1.0, parallel_transfers=1) as peer, LocalAgent(parallel_transfers=4) as agent:
        await peer.export("m1", ALL)
        await asyncio.gather(
            *(agent.pull(peer.address, "m1", [n, n + 9], [n, n + 9], DEADLINE_S) for n in (0, 1, 2, 3))
        )
        blocks = [0, 1, 2, 3, 9, 10, 11, 12]
        assert agent.has(peer, blocks, blocks)


async def test_only_what_is_exported_can_be_read() -> None:
    async with peer_process() as peer, LocalAgent() as agent:
        with pytest.raises(KvTransferRefused, match="no token of a transfer"):
            await agent.pull(peer.address, "m1", ALL, ALL, DEADLINE_S)
        await peer.export("m1", [1, 2])
        with pytest.raises(KvTransferRefused, match=r"blocks \[3\] \(1 in all\) are not exported"):
            await agent.pull(peer.address, "m1", [2, 3], [0, 1], DEADLINE_S)
        assert not any(region.any() for region in agent.regions)
        await peer.export("m1", [3])
        await agent.pull(peer.address, "m1", [2, 3], [0, 1], DEADLINE_S)
        await peer.tell(do="withdraw", id="m1")
        with pytest.raises(KvTransferRefused, match="nothing is exported"):
            await agent.pull(peer.address, "m1", [2, 3], [0, 1], DEADLINE_S)
        assert agent.has(peer, [2, 3], [0, 1])


async def test_without_the_token_of_the_export_nothing_is_read() -> None:
    async with peer_process() as peer, LocalAgent() as agent:
        await peer.export("m1", ALL)
        await peer.export("m2", ALL, token="1" * 32)
        for token, transfer_id in (("", "m1"), ("2" * 32, "m1"), (peer.address.token, "m2")):
            with pytest.raises(KvTransferRefused, match="no token of"):
                await agent.pull(replace(peer.address, token=token), transfer_id, ALL, ALL, DEADLINE_S)
        assert not any(region.any() for region in agent.regions)
        await peer.until(rejected_total=3)
        await agent.pull(peer.address, "m1", ALL, ALL, DEADLINE_S)
        assert agent.has(peer, ALL, ALL)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"block_tokens": 32}, "block_tokens is 16 here and 32 there"),
        ({"region_bytes": [16 * 1024]}, r"3 regions \(layers\) here and 1 there"),
        ({"message_bytes": 1024 * 1024}, "give all workers one message_bytes"),
    ],
)
async def test_another_layout_is_refused(other: dict[str, int], reason: str) -> None:
    async with peer_process(**other) as peer, LocalAgent() as agent:
        await peer.export("m1", ALL)
        with pytest.raises(KvTransferRefused, match=reason):
            await agent.pull(peer.address, "m1", [1], [1], DEADLINE_S)


async def test_a_checksum_finds_a_torn_block() -> None:
    async with peer_process(torn=True, checksums=True) as peer, LocalAgent(checksums=True) as agent:
        await peer.export("m1", ALL)
        with pytest.raises(KvBlockCorrupt, match="has xxh3"):
            await agent.pull(peer.address, "m1", ALL, ALL, DEADLINE_S)
