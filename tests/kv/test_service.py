"""The gRPC service, found and called as grpcurl does it."""

import asyncio
from typing import Any

import grpc
import pytest

from engine_worker.kv.service import SERVICE_NAME, KvTransferService
from mesh.errors import KvTransferFailed
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from penstock.v1 import kv_transfer_pb2_grpc
from tests.kv.peer import TOKEN
from tests.kv.peer_process import BLOCKS, LocalAgent, PeerProcess, peer_process
from tests.reflection import ReflectionClient

ALL = range(BLOCKS)


def order(peer: PeerProcess, transfer_id: str, target: list[int]) -> dict[str, Any]:
    return {
        "host": "127.0.0.1",
        "port": peer.address.port,
        "transfer_id": transfer_id,
        "source_block_ids": [1, 2, 3],
        "target_block_ids": target,
        "deadline_ms": 5000,
        "kv_token": TOKEN,
    }


async def test_described_ordered_and_asked_through_reflection() -> None:
    async with peer_process() as peer, LocalAgent() as agent:
        await peer.export("m1", ALL)
        server = RpcServer(GrpcTransport())
        server.add(
            kv_transfer_pb2_grpc.add_KvTransferServicer_to_server,
            KvTransferService(lambda: agent, lambda: "10.0.0.7"),
            SERVICE_NAME,
        )
        client = ReflectionClient(await server.start())
        try:
            assert SERVICE_NAME in await asyncio.to_thread(client.services)
            about = await asyncio.to_thread(client.call, SERVICE_NAME, "Describe")
            assert (about["host"], about["port"], about["block_tokens"]) == ("10.0.0.7", agent.port, 16)
            assert about["region_block_bytes"] == ["16384", "16384", "8192"]
            with pytest.raises(grpc.RpcError) as refused:
                await asyncio.to_thread(client.call, SERVICE_NAME, "Pull", order(peer, "m1", [7, 8, 9]))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "nothing is reserved under 'm1'" in refused.value.details()
            agent.orders.reserve("m1", [7, 8, 9])
            moved = await asyncio.to_thread(client.call, SERVICE_NAME, "Pull", order(peer, "m1", [7, 8, 9]))
            assert moved["kv_bytes"] == str(3 * 40 * 1024)
            assert agent.has(peer, [1, 2, 3], [7, 8, 9])
            agent.export("m9", [4, 5], TOKEN)
            status = await asyncio.to_thread(client.call, SERVICE_NAME, "Status")
            assert (status["exports"], status["exported_blocks"], status["pulls_total"]) == (["m9"], 2, "1")
        finally:
            client.close()
            await server.stop(0)


async def test_released_blocks_are_not_written_to() -> None:
    async with peer_process(read_ms=5.0) as peer, LocalAgent(gathered_bytes=128 * 1024) as agent:
        await peer.export("m1", ALL)
        agent.orders.reserve("m1", ALL)
        pull = asyncio.create_task(agent.orders.pull(peer.address, "m1", ALL, [*reversed(ALL)], 60.0))
        await agent.first_bytes(pull)
        await agent.orders.release("m1")
        kept = [region.copy() for region in agent.regions]
        with pytest.raises(KvTransferFailed, match="were released"):
            await pull
        await asyncio.sleep(0.2)
        assert all((now == before).all() for now, before in zip(agent.regions, kept, strict=True))
