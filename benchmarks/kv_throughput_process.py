"""One of the two processes of `kv_throughput`: holds KV memory and moves it by one method.

Reads lines of JSON ({"do": "pull", ...} or {"do": "cpu"}) and answers each with one.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import numpy as np

from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.device_memory import DeviceMemory
from engine_worker.kv.memory import KvMemory, RegionMemory
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.ucx_environment import has_cuda_transport, load_ucx
from mesh.rpc.limits import CHANNEL_OPTIONS, SERVER_OPTIONS
from mesh.runtime import SystemClock, SystemEntropy

REGIONS = 32
BLOCK_BYTES = 32 * 1024
"""In each region: with these, 1 MiB a block."""
GRPC_MESSAGE_BYTES = 1024 * 1024
DEADLINE_S = 60.0
TOKEN = "0" * 32


class Mover(Protocol):
    """One way to move KV blocks from another process into this one's memory."""

    async def start(self) -> int:
        """Begin to serve this process's blocks; returns the port."""

    async def pull(self, port: int, command: dict[str, Any]) -> None:
        """Pull from the process that listens there."""


class AgentMover:
    """The `Mover` that is the mesh's own KV transfer agent."""

    def __init__(self, memory: np.ndarray, options: dict[str, Any]) -> None:
        regions = memory.reshape(REGIONS, -1, BLOCK_BYTES)
        self._blocks = regions.shape[1]
        settings = KvTransferSettings(**options)
        kv_memory = _on_gpu(regions) if settings.device == "cuda" else _on_host(regions)
        self._agent = KvTransferAgent(kv_memory, settings, SystemClock(), SystemEntropy(), agent_id="benchmark")

    async def start(self) -> int:
        port = await self._agent.start()
        self._agent.export("kv", range(self._blocks), TOKEN)
        return port

    async def pull(self, port: int, command: dict[str, Any]) -> None:
        """`blocks` is "contiguous" or "scattered"; `parallel` is the number of pulls that share them."""
        source, target = list(range(self._blocks)), list(range(self._blocks))
        if command["blocks"] == "scattered":
            shuffled = random.Random(7)
            shuffled.shuffle(source)
            shuffled.shuffle(target)
        share = -(-self._blocks // command["parallel"])
        peer = PeerAddress("127.0.0.1", port, (), TOKEN)
        await asyncio.gather(
            *(
                self._agent.pull(peer, "kv", source[first : first + share], target[first : first + share], DEADLINE_S)
                for first in range(0, self._blocks, share)
            )
        )


def _on_host(regions: np.ndarray) -> KvMemory:
    return RegionMemory(list(regions), model="m", dtype="uint8", block_tokens=16)


def _on_gpu(regions: np.ndarray) -> KvMemory:
    """A copy of the regions in the memory of the first GPU; by way of the host's where UCX has no CUDA transport."""
    import torch

    from engine_worker.engines.vllm.connector.cuda import CudaAccelerator

    accelerator = CudaAccelerator(torch.device("cuda", 0))
    accelerator.use_in_this_thread()
    copies = [torch.from_numpy(region).cuda() for region in regions]
    torch.cuda.synchronize()
    return DeviceMemory(
        copies,
        accelerator,
        sends_device_memory=has_cuda_transport(load_ucx("cuda")),
        model="m",
        dtype="uint8",
        block_tokens=16,
    )


class GrpcMover:
    """The `Mover` to beat: a server stream of 1 MiB messages, each copied to its place in the memory."""

    def __init__(self, memory: np.ndarray, options: dict[str, Any]) -> None:
        self._memory = memory
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> int:
        handler = grpc.method_handlers_generic_handler(
            "Benchmark", {"Pull": grpc.unary_stream_rpc_method_handler(self._send)}
        )
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return int(port)

    async def pull(self, port: int, command: dict[str, Any]) -> None:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
        offset = 0
        async for message in self._channel.unary_stream("/Benchmark/Pull")(b"", timeout=DEADLINE_S):
            self._memory[offset : offset + len(message)] = np.frombuffer(message, np.uint8)
            offset += len(message)

    async def _send(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for offset in range(0, self._memory.size, GRPC_MESSAGE_BYTES):
            yield self._memory[offset : offset + GRPC_MESSAGE_BYTES].tobytes()


class BareMover:
    """The `Mover` that shows what UCX can do at best: ucxx's own asyncio interface, one tag, messages of one size,
    receives posted before they are asked for."""

    def __init__(self, memory: np.ndarray, options: dict[str, Any]) -> None:
        self._ucx = load_ucx("cpu")
        self._ucx.init(progress_mode=options["progress_mode"])
        size = options["message_bytes"]
        self._parts = [memory[offset : offset + size] for offset in range(0, memory.size, size)]
        self._endpoint: Any = None
        self._listener: Any = None

    async def start(self) -> int:
        self._listener = self._ucx.create_listener(self._serve, 0)
        return int(self._listener.port)

    async def pull(self, port: int, command: dict[str, Any]) -> None:
        if self._endpoint is None:
            self._endpoint = await self._ucx.create_endpoint("127.0.0.1", port)
        receives = [asyncio.ensure_future(self._endpoint.recv(part, tag=2)) for part in self._parts]
        await self._endpoint.send(np.ones(8, np.uint8), tag=1)
        await asyncio.gather(*receives)

    async def _serve(self, endpoint: Any) -> None:
        asked = np.zeros(8, np.uint8)
        while True:
            await endpoint.recv(asked, tag=1)
            await asyncio.gather(*(endpoint.send(part, tag=2) for part in self._parts))


class MemcpyMover:
    """What this machine's memory can do: one thread copies the same bytes within one process."""

    def __init__(self, memory: np.ndarray, options: dict[str, Any]) -> None:
        self._memory = memory
        self._source = np.ones_like(memory)

    async def start(self) -> int:
        return 0

    async def pull(self, port: int, command: dict[str, Any]) -> None:
        np.copyto(self._memory, self._source)


MOVERS: dict[str, type[AgentMover | GrpcMover | BareMover | MemcpyMover]] = {
    "memcpy": MemcpyMover,
    "agent": AgentMover,
    "grpc": GrpcMover,
    "bare": BareMover,
}


async def serve(method: str, options: dict[str, Any], blocks: int) -> None:
    """Answer commands until the input ends."""
    memory = np.ones(REGIONS * blocks * BLOCK_BYTES, np.uint8)
    mover: Mover = MOVERS[method](memory, options)
    print(await mover.start(), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        began_s = time.perf_counter()
        if command["do"] == "pull":
            await mover.pull(command["port"], command)
        print(json.dumps({"seconds": time.perf_counter() - began_s, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
