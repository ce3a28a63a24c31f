"""Blocks of the simulated engine in the memory of its host: what it computes is saved, what it lacks is loaded."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from controlplane.model.kv_costs import datasheet_kv_costs
from controlplane.model.request import EngineRequest
from engine_worker.host_tier.disk_tier import DiskTier
from engine_worker.host_tier.names import block_names, root_name
from engine_worker.host_tier.store import HostStore
from mesh.errors import HostTierUnavailable, KvBlockCorrupt, RequestRefused
from mesh.runtime import Clock
from mesh.tasks import TaskSet
from simulator.instance.instance import SimulatedInstance
from simulator.instance.tokens import RequestTokens

log = logging.getLogger(__name__)

LEAST_BLOCKS: Final = 2
"""Fewer are not worth a load."""
_TURN_BLOCKS = 16
"""Blocks that are worked out or checked before others have their turn of the event loop: about a millisecond."""
_MOST_UNSAVED = 4096
_MOST_NAMED = 256
_NEWS_SHARE = 0.2


class SimulatedHostTier:
    """Saves blocks as they become full, and brings what a request lacks into the prefix cache before it is queued."""

    def __init__(
        self,
        instance: SimulatedInstance,
        store: HostStore,
        clock: Clock,
        tasks: TaskSet,
        submit: Callable[[EngineRequest], None],
        disk: DiskTier | None = None,
        *,
        time_scale: float,
    ) -> None:
        """`submit` queues a request whose blocks have been loaded, or could not be."""
        self.store = store
        self.disk = disk
        self.load_token_ms = 0.0
        """What a token took, over the last loads."""
        self._instance = instance
        self._clock = clock
        self._tasks = tasks
        self._submit = submit
        self._time_scale = time_scale
        self._costs = datasheet_kv_costs(0, pulls=False, loads=True)
        self._loading: dict[str, tuple[EngineRequest, asyncio.Task[None]]] = {}
        self._waiting_tokens: dict[str, int] = {}
        """Of requests that wait for their blocks: what they will have to compute besides."""
        self._loaded_tokens: dict[str, tuple[int, int]] = {}
        """By request: all, and those of them that came from the disk."""
        self._unsaved: deque[int] = deque(maxlen=_MOST_UNSAVED)
        self._named: dict[RequestTokens, list[bytes]] = {}
        """Names of the blocks of requests that saved some of late."""
        self._wake = asyncio.Event()
        self._is_broken = False

    @property
    def loading(self) -> tuple[str, ...]:
        """Requests that wait for their blocks."""
        return tuple(self._loading)

    @property
    def waiting_prefill_tokens(self) -> int:
        """What they will have to compute besides."""
        return sum(self._waiting_tokens.values())

    def begin(self, request: EngineRequest) -> bool:
        """Whether some of its blocks are worth a load: `submit` follows then. Raises `RequestRefused`."""
        cached, names = self._instance.cached_blocks(request), self._names(request)
        count = self._leading(names[cached:])
        if count < LEAST_BLOCKS:
            return False
        tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        self._waiting_tokens[request.request_id] = tokens - (cached + count) * self._instance.config.block_tokens
        loading = self._tasks.spawn(self._load(request, names, cached, count), name=f"load {request.request_id}")
        self._loading[request.request_id] = request, loading
        return True

    def cancel(self, request_id: str) -> EngineRequest | None:
        """The request was taken back; returned if it was waiting for its blocks."""
        self._waiting_tokens.pop(request_id, None)
        self._loaded_tokens.pop(request_id, None)
        if request_id not in self._loading:
            return None
        request, loading = self._loading.pop(request_id)
        loading.cancel()
        return request

    def take_loaded_tokens(self, request_id: str) -> tuple[int, int]:
        """How many tokens were loaded for a request, whose first step is over, and how many of them from the disk."""
        return self._loaded_tokens.pop(request_id, (0, 0))

    def stored(self, block_hashes: Sequence[int]) -> None:
        """The prefix cache has new blocks: they are to be saved."""
        if block_hashes:
            self._unsaved.extend(block_hashes)
            self._wake.set()

    async def save(self) -> None:
        """Save blocks until cancelled. They are read before anybody can evict them, and written beside the steps."""
        while True:
            await self._wake.wait()
            while self._unsaved:
                turn = [self._unsaved.popleft() for _ in range(min(_TURN_BLOCKS, len(self._unsaved)))]
                try:
                    await self._save(turn)
                    self._is_broken = False
                except HostTierUnavailable as error:
                    self._note_broken(error)
                await self._clock.sleep(0.0)
            self._wake.clear()

    async def _save(self, block_hashes: Sequence[int]) -> None:
        reserved: list[tuple[int, int]] = []
        chains: list[tuple[list[bytes], int, int]] = []
        try:
            for block_hash in block_hashes:
                cached = self._instance.cached_block(block_hash)
                if cached is None:
                    continue
                names = self._names_of(cached.text, cached.index + 1)
                if self.store.lacks(names[-1]):
                    content = self._instance.read_block(cached.block_id)
                    for _, slot in self.store.reserve(names, cached.index, 1):
                        reserved.append((slot, block_hash))
                        chains.append((names, cached.index, block_hash))
                        self.store.view(slot)[:] = memoryview(content)
            if reserved:
                await self._clock.sleep(self._ms(len(reserved)) / 1000)
                self.store.commit(reserved)
                if self.disk is not None:
                    for chain in chains:
                        self.disk.saved(*chain)
        except BaseException:
            self.store.abandon([slot for slot, _ in reserved])
            raise

    async def bring(self, prefix: EngineRequest, most_blocks: int) -> None:
        """Have the leading blocks of a prompt in the prefix cache, as far as the host has them, for a peer; what that
        takes of the engine's memory is at most half of what is free."""
        cached = self._instance.cached_blocks(prefix)
        if most_blocks - cached < LEAST_BLOCKS:
            return
        names, load = self._names(prefix)[:most_blocks], self._instance.load()
        count = min(self._leading(names[cached:]), (self._instance.config.kv_blocks - load.kv_blocks_used) // 2)
        if count >= LEAST_BLOCKS:
            await self._bring(prefix, names, cached, count)

    def _leading(self, names: Sequence[bytes]) -> int:
        return (self.store if self.disk is None else self.disk).leading(names)

    async def _load(self, request: EngineRequest, names: list[bytes], cached: int, count: int) -> None:
        loaded = await self._bring(request, names, cached, count)
        if self._loading.pop(request.request_id, None) is not None:
            del self._waiting_tokens[request.request_id]
            self._loaded_tokens[request.request_id] = loaded
            self._submit(request)

    async def _bring(self, request: EngineRequest, names: list[bytes], cached: int, count: int) -> tuple[int, int]:
        """Tokens that were loaded, and how many of them from the disk."""
        carrier = replace(request, request_id=f"{request.request_id}/host")
        began_s, slots, of_disk = self._clock.now_s(), list[int](), 0
        try:
            if self.disk is not None:
                of_disk = await self.disk.load(names[: cached + count])
            slots = self.store.pin(names[cached : cached + count])
            contents = await self._whole(slots)
            awaited = self._instance.admit_carrier(carrier, cached + len(contents))
            if awaited.first_block < cached:
                raise RequestRefused("blocks in front of those of the host have been evicted meanwhile")
            await self._clock.sleep(self._ms(len(awaited.block_ids)) / 1000)
            for place, block_id in enumerate(awaited.block_ids, start=awaited.first_block - cached):
                self._instance.write_block(block_id, contents[place])
            self._instance.store_carried(carrier.request_id)
            self._measured(len(awaited.block_ids), self._clock.now_s() - began_s)
            loaded = len(awaited.block_ids) * self._instance.config.block_tokens
            return loaded, min(loaded, of_disk * self._instance.config.block_tokens)
        except HostTierUnavailable as error:
            self._note_broken(error)
        except RequestRefused as error:
            log.info("blocks of the host were not loaded", extra={"reason": str(error)})
        except KvBlockCorrupt:
            log.exception("a block of the host's store is not what its name says; it is computed anew")
        finally:
            self._instance.abort(carrier.request_id)
            self._unpin(slots)
        return 0, 0

    async def _whole(self, slots: Sequence[int]) -> list[bytes]:
        """The leading blocks that are what was written. They are copied as they are checked: the memory of the host may
        change until they are loaded."""
        contents = list[bytes]()
        for number, slot in enumerate(slots):
            if number % _TURN_BLOCKS == 0:
                await self._clock.sleep(0.0)
            if not self.store.is_whole(slot):
                log.error("a block of the host's store has changed; it is computed anew", extra={"slot": slot})
                break
            contents.append(self.store.view(slot).tobytes())
        return contents

    def _unpin(self, slots: Sequence[int]) -> None:
        try:
            self.store.unpin(slots)
        except HostTierUnavailable as error:
            self._note_broken(error)

    def _ms(self, blocks: int) -> float:
        """As the simulator prices a load."""
        tokens = blocks * self._instance.config.block_tokens
        return (self._costs.load_fixed_ms + (self._costs.load_token_ms or 0.0) * tokens) * self._time_scale

    def _measured(self, blocks: int, duration_s: float) -> None:
        if blocks:
            token_ms = 1000 * duration_s / (blocks * self._instance.config.block_tokens)
            self.load_token_ms += (token_ms - self.load_token_ms) * (_NEWS_SHARE if self.load_token_ms else 1.0)

    def _note_broken(self, error: HostTierUnavailable) -> None:
        if not self._is_broken:
            log.error("the host's store of KV blocks cannot be used", extra={"error": str(error)})
        self._is_broken = True

    def _names_of(self, text: RequestTokens, blocks: int) -> list[bytes]:
        """Of the first blocks of a request here, worked out once."""
        names = self._named.setdefault(text, [])
        if len(names) < blocks:
            while len(self._named) > _MOST_NAMED:
                del self._named[next(iter(self._named))]
            block_tokens, first = self._instance.config.block_tokens, len(names)
            parent = names[-1] if names else root_name(text.cache_salt, text.adapter_digest)
            tokens = text.between(first * block_tokens, blocks * block_tokens)
            names += block_names(tokens, block_tokens, parent, text.media, first * block_tokens)
        return names[:blocks]

    def _names(self, request: EngineRequest) -> list[bytes]:
        """Of the full blocks of its tokens, of which at least the last one is to be computed."""
        token_ids = (request.prompt_token_ids + request.emitted_token_ids)[:-1]
        root = root_name(request.cache_salt, request.adapter_digest)
        return block_names(token_ids, self._instance.config.block_tokens, root, request.media_spans)
