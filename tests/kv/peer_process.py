"""Starts `peer.py` as a process and talks to it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.settings import KvTransferSettings
from mesh.runtime import SystemClock, SystemEntropy
from tests.kv.peer import TOKEN, regions_of

REGION_BYTES = [16 * 1024, 16 * 1024, 8 * 1024]
BLOCKS = 512
BLOCK_TOKENS = 16


class PeerProcess:
    """An agent in a process of its own, whose blocks the test knows."""

    def __init__(self, process: asyncio.subprocess.Process, address: PeerAddress, regions: list[np.ndarray]) -> None:
        self._process = process
        self.address = address
        self.regions = regions
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def tell(self, **command: Any) -> Any:
        """Send a command, return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            line = await self._process.stdout.readline()
        return json.loads(line)

    async def until(self, **expected: int) -> None:
        """Return when the peer's status is so."""
        while True:
            status = await self.tell(do="status")
            if all(status[name] == value for name, value in expected.items()):
                return
            await asyncio.sleep(0.01)

    async def export(self, export_id: str, blocks: Sequence[int], token: str = TOKEN) -> None:
        await self.tell(do="export", id=export_id, blocks=list(blocks), token=token)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@asynccontextmanager
async def peer_process(
    seed: int = 1,
    *,
    blocks: int = BLOCKS,
    region_bytes: Sequence[int] = REGION_BYTES,
    block_tokens: int = BLOCK_TOKENS,
    read_ms: float = 0.0,
    torn: bool = False,
    host: str = "127.0.0.1",
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[PeerProcess]:
    options = {
        "seed": seed,
        "blocks": blocks,
        "region_bytes": list(region_bytes),
        "block_tokens": block_tokens,
        "read_ms": read_ms,
        "torn": torn,
        "settings": {"host": host, **settings},
        "agent_id": f"peer-{seed}",
    }
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-m",
        "tests.kv.peer",
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | (environment or {}),
        limit=2**20,
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        yield PeerProcess(process, PeerAddress(host, port, (), TOKEN), regions_of(seed, blocks, list(region_bytes)))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class LocalAgent(KvTransferAgent):
    """An agent in the test's process, whose memory starts as zeros."""

    def __init__(
        self,
        *,
        blocks: int = BLOCKS,
        region_bytes: Sequence[int] = REGION_BYTES,
        block_tokens: int = BLOCK_TOKENS,
        **settings: Any,
    ) -> None:
        self.regions = [np.zeros((blocks, nbytes), np.uint8) for nbytes in region_bytes]
        memory = RegionMemory(self.regions, model="m", dtype="uint8", block_tokens=block_tokens)
        super().__init__(memory, KvTransferSettings(**settings), SystemClock(), SystemEntropy(), agent_id="here")

    async def __aenter__(self) -> "LocalAgent":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def clear(self) -> None:
        """Zeros again."""
        for region in self.regions:
            region[:] = 0

    def has(self, peer: PeerProcess, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether the peer's blocks are here, and nothing else was touched."""
        others = sorted(set(range(len(self.regions[0]))) - set(target))
        return all(
            (here[list(target)] == there[list(source)]).all() and not here[others].any()
            for here, there in zip(self.regions, peer.regions, strict=True)
        )

    async def first_bytes(self, pull: "asyncio.Task[Any]") -> None:
        """Return when something has arrived. Raises what the pull raised if that was before."""
        while not any(region.any() for region in self.regions):  # UCX writes them; nobody tells
            if pull.done():
                pull.result()
            await asyncio.sleep(0.001)
