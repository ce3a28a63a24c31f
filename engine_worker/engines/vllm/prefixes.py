"""Cached prefixes that peers pull from vLLM, and theirs that come here.

The scheduler side of a KV connector sees requests only, and only vLLM knows under which hashes it has a prompt's
blocks. So who wants a prefix held submits the prompt as a *holder*: a request that is never scheduled. As it enters
vLLM's queue the connector looks its blocks up and takes a reference to them; then the holder is aborted, and the engine
core keeps it as it keeps any finished request whose blocks are still being read, until it is let go. (A request that is
run for one token on top of its prefix-cache hits was the other way: it takes a place in the batch, computes up to a
block, and computes a prefix that has been evicted meanwhile, instead of being refused.)

What the memory of the host has of it is brought into the prefix cache before, by a *loader*: a request that vLLM
schedules once its blocks have been loaded, for the one token behind them, and never where there is nothing to load.
"""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

from controlplane.model.request import EngineRequest, engine_priority
from engine_worker.adapters import NumberedAdapter
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.vllm.adapters import VllmAdapters
from engine_worker.engines.vllm.carriers import UnreadRequests, carry
from engine_worker.engines.vllm.connector.channel import CoreChannel
from engine_worker.engines.vllm.connector.messages import FreeBlocks, Held, Hold, HoldNow, HostLoaded, LetGo
from engine_worker.kv.connection import PeerAddress
from mesh.errors import DeadlineExceeded, EngineFailed, RequestRefused


class VllmPrefixes:
    """Implements `PrefixTransfers`."""

    def __init__(
        self, channel: CoreChannel, core: UnreadRequests, limits: EngineLimits, adapters: VllmAdapters | None
    ) -> None:
        """`adapters`: None for an engine that serves none."""
        self._channel = channel
        self._core = core
        self._limits = limits
        self._adapters = adapters
        self._holds: dict[str, asyncio.Future[tuple[int, ...]]] = {}
        self._loads: dict[str, asyncio.Future[int]] = {}
        """Of loaders: how many blocks the host had."""
        self.loads_from_host = False
        """Whether there is a store in the memory of the host."""

    async def hold(
        self, hold_id: str, request: EngineRequest, most_blocks: int, wait_s: float, kv_token: str
    ) -> tuple[int, ...]:
        adapter = self._loaded(request)
        if self.loads_from_host and not wait_s:  # whoever computes it here has loaded what there is
            await self._load(f"{hold_id}/host", request, most_blocks, adapter)
        held: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        self._holds[hold_id] = held
        await self._channel.call(Hold(hold_id, kv_token))
        told = {"hold": hold_id, "blocks": most_blocks, "waits": wait_s > 0}
        tokens = request.prompt_token_ids
        holder = asyncio.create_task(
            self._core.run_unread(hold_id, request, tokens, told, request.engine_priority, adapter)
        )
        try:
            await asyncio.wait((held, holder), timeout=wait_s or None, return_when=asyncio.FIRST_COMPLETED)
            if not held.done() and not holder.done():
                await self._channel.call(HoldNow(hold_id))
                await asyncio.wait((held, holder), return_when=asyncio.FIRST_COMPLETED)
            if held.done():
                return held.result()
            holder.result()
            raise EngineFailed(f"vLLM ended the holder of {hold_id} before it held anything")
        finally:
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)

    def let_go(self, hold_id: str) -> None:
        if self._holds.pop(hold_id, None) is not None:
            self._channel.send(LetGo(hold_id))

    def host_loaded(self, notice: HostLoaded) -> bool:
        """Whether the blocks were loaded for one of these, and not for a client's request."""
        load = self._loads.get(notice.request_id)
        if load is not None and not load.done():
            load.set_result(notice.blocks)
        return load is not None

    def held(self, notice: Held) -> None:
        """The engine core has pinned what it has."""
        held = self._holds.get(notice.hold_id)
        if held is not None and not held.done():
            held.set_result(notice.block_ids)

    async def fetch(
        self, pull_id: str, request: EngineRequest, peer: str, peer_block_ids: tuple[int, ...], deadline_s: float
    ) -> int:
        blocks = len(peer_block_ids)
        tokens = request.prompt_token_ids[: blocks * self._limits.block_tokens]
        load_id = f"{pull_id}/carrier"
        try:
            async with asyncio.timeout(deadline_s), self._reserved(load_id, request) as adapter:
                # vLLM would let the carrier wait for room, and the request waits for the carrier.
                free = int(await self._channel.call(FreeBlocks()))
                if blocks > free:
                    raise RequestRefused(f"the prefix has {blocks} KV blocks, and {free} are free")
                pulled = await carry(
                    self._core,
                    self._channel,
                    load_id,
                    pull_id,
                    request,
                    tokens,
                    peer,
                    peer_block_ids,
                    adapter,
                    deadline_s,
                )
            if self._adapters is not None:
                self._adapters.cache.end(load_id)
            return pulled
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{blocks} blocks of {pull_id} did not arrive from {PeerAddress.parse(peer)} within {deadline_s:g} s"
            ) from error

    async def _load(self, load_id: str, request: EngineRequest, blocks: int, adapter: NumberedAdapter | None) -> None:
        """Bring blocks of the prompt from the host's memory, if it has some that lack and half of what is free is room
        enough: vLLM would let everybody behind the loader wait for it."""
        if blocks > int(await self._channel.call(FreeBlocks())) // 2:
            return
        loaded: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._loads[load_id] = loaded
        told, priority = {"request_id": load_id, "only_loads": True}, engine_priority(request.priority - 1)
        loader = asyncio.create_task(
            self._core.run_unread(load_id, request, request.prompt_token_ids, told, priority, adapter)
        )
        try:
            await asyncio.wait((loaded, loader), return_when=asyncio.FIRST_COMPLETED)
            if loaded.done() and loaded.result():  # vLLM has them in its prefix cache once it has scheduled the loader
                await asyncio.wait((loader,))
        finally:
            loader.cancel()
            await asyncio.gather(loader, return_exceptions=True)
            del self._loads[load_id]

    def _reserved(self, load_id: str, request: EngineRequest) -> AbstractAsyncContextManager[NumberedAdapter | None]:
        return nullcontext() if self._adapters is None else self._adapters.reserved(load_id, request.adapter)

    def _loaded(self, request: EngineRequest) -> NumberedAdapter | None:
        """As vLLM knows it. It is not loaded for this: blocks of an adapter that is not here are not worth that."""
        if request.adapter is None:
            return None
        number = None if self._adapters is None else self._adapters.cache.number(request.adapter.digest)
        if self._adapters is None or number is None:
            raise RequestRefused(f"the LoRA adapter {request.adapter.name} is not loaded here")
        return self._adapters.cache.adapter(request.adapter.digest), number
