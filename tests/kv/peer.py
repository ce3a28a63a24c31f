"""A process with an agent, driven by lines of JSON on its standard input.

{"do": "export", "id": "m1", "blocks": [0, 1]}
{"do": "withdraw", "id": "m1"}
{"do": "pull", "host": ..., "port": ..., "id": "m1", "source": [...], "target": [...], "deadline_s": 5}
{"do": "status"}, {"do": "cpu"}, {"do": "content"}
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.memory import Buffer, RegionMemory
from engine_worker.kv.plan import RegionBlocks
from engine_worker.kv.settings import KvTransferSettings
from mesh.errors import PenstockError
from mesh.runtime import SystemClock, SystemEntropy

TOKEN = "0" * 32
"""Of every export that is given no other."""


def regions_of(seed: int, blocks: int, region_bytes: list[int]) -> list[np.ndarray]:
    """What a peer of this seed holds."""
    return [
        np.random.default_rng([seed, region]).integers(0, 256, (blocks, nbytes), np.uint8)
        for region, nbytes in enumerate(region_bytes)
    ]


class TestMemory(RegionMemory):
    """Slow to read, or written to by its engine while it is being sent, as asked."""

    __test__ = False

    def __init__(self, regions: list[np.ndarray], *, read_ms: float, torn: bool, block_tokens: int) -> None:
        super().__init__(regions, model="m", dtype="uint8", block_tokens=block_tokens)
        self.regions = regions
        self._read_ms = read_ms
        self._torn = torn

    def view(self, region: int, first_block: int, count: int) -> Buffer | None:
        return None if self._read_ms else super().view(region, first_block, count)

    async def gather(self, blocks: Sequence[RegionBlocks], into: Buffer) -> None:
        time.sleep(sum(len(each.ids) for each in blocks) * self._read_ms / 1e3)  # noqa: ASYNC251 - a copy holds the agent's thread up, too
        await super().gather(blocks, into)

    def host_bytes(self, buffer: Buffer) -> memoryview:
        """Its content as it was before the engine's next step."""
        if not self._torn:
            return super().host_bytes(buffer)
        before = memoryview(buffer.copy())
        buffer[len(buffer) // 2] ^= 0xFF
        return before


async def serve(options: dict[str, Any]) -> None:
    regions = regions_of(options["seed"], options["blocks"], options["region_bytes"])
    memory = TestMemory(regions, read_ms=options["read_ms"], torn=options["torn"], block_tokens=options["block_tokens"])
    agent = KvTransferAgent(
        memory, KvTransferSettings(**options["settings"]), SystemClock(), SystemEntropy(), agent_id=options["agent_id"]
    )
    print(await agent.start(), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await answer(agent, regions, json.loads(line))), flush=True)
    await agent.stop()


async def answer(agent: KvTransferAgent, regions: list[np.ndarray], command: dict[str, Any]) -> Any:
    match command["do"]:
        case "export":
            agent.export(command["id"], command["blocks"], command.get("token", TOKEN))
        case "withdraw":
            await agent.withdraw(command["id"])
        case "pull":
            peer = PeerAddress(command["host"], command["port"], (), command.get("token", TOKEN))
            try:
                stats = await agent.pull(
                    peer, command["id"], command["source"], command["target"], command["deadline_s"]
                )
            except PenstockError as error:
                return {"error": f"{type(error).__name__}: {error}"}
            return asdict(stats)
        case "status":
            return asdict(await agent.status())
        case "cpu":
            return time.process_time()
        case "same":
            others = regions_of(1, len(regions[0]), [region.shape[1] for region in regions])
            return all(bool((here == there).all()) for here, there in zip(regions, others, strict=True))
    return None


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
