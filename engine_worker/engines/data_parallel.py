"""One instance of several engine cores (vLLM's data parallelism): copies of the model in one engine, each with a
scheduler, a prefix cache and a KV space of its own.

A request lives in one core. The mesh places it on the instance; which core it gets is decided here, by the score that
LMetric places by (section 5): new prefill tokens times batch size. To peers the cores' blocks are one space
(`kv.cores`).
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

import msgspec

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, StepOutput
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.engines.prefix import PrefixEngine, PrefixTransfers
from engine_worker.engines.step_buffer import StepBuffer
from engine_worker.kv.addresses import join_cores
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.cores import MOST_CORES, ids_of_core
from engine_worker.kv.service import AgentPort
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats
from mesh.errors import ConfigurationError, EngineFailed, KvTransferRefused, RequestRefused

_MOST_WAITING: Final = 1024
"""Of what the cores tell."""
ItemT = TypeVar("ItemT")
_MOST_FETCHED: Final = 64
"""Prefixes that were pulled lately, whose core is kept in mind."""


class CoreEngine(PrefixEngine, Protocol):
    """The engine that one core is."""

    def runs(self, request_id: str) -> bool:
        """Whether the request is here, paused or not."""

    def cached_tokens(self, request: EngineRequest) -> int:
        """How many leading tokens of its context the prefix cache has, as far as is known."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    core: int
    prefix: EngineRequest
    tokens: int

    def tokens_of(self, request: EngineRequest) -> int:
        """Leading tokens of a request that came with it."""
        same = (self.prefix.cache_salt, self.prefix.adapter_digest) == (request.cache_salt, request.adapter_digest)
        head = self.prefix.prompt_token_ids[: self.tokens]
        return self.tokens if same and request.prompt_token_ids[: self.tokens] == head else 0


class DataParallelEngine:
    """Implements `PrefixEngine` by those of its cores."""

    def __init__(self, cores: Sequence[CoreEngine]) -> None:
        """They are started one after the other, the first one first, and stopped the other way round."""
        if not 1 < len(cores) <= MOST_CORES:
            raise ConfigurationError(f"data parallelism of {len(cores)}: give 2 to {MOST_CORES}, or leave it out")
        self.cores = tuple(cores)
        self._readers: list[asyncio.Task[None]] = []
        self._buffer = StepBuffer()
        self._failure: EngineFailed | None = None
        self._arriving: dict[str, int] = {}
        """The core that each migration was reserved in."""
        self._prefixes = _Prefixes(self)
        self.block_tokens = 0
        """Once it is started."""

    async def start(self) -> EngineLimits:
        """See `Engine.start`. Blocks, and what runs at once, are those of all cores."""
        limits = [await core.start() for core in self.cores]
        self.block_tokens = limits[0].block_tokens
        self._readers = [asyncio.create_task(self._read_outputs(core), name="outputs of a core") for core in self.cores]
        return replace(
            limits[0],
            kv_blocks=sum(each.kv_blocks for each in limits),
            max_batch_requests=sum(each.max_batch_requests for each in limits),
            max_step_tokens=sum(each.max_step_tokens for each in limits),
            data_parallel=len(limits),
        )

    async def stop(self) -> None:
        for core in reversed(self.cores):
            await core.stop()
        # With what the ends of the requests are told.
        await asyncio.gather(*self._readers)
        self._buffer.close()

    def submit(self, request: EngineRequest) -> None:
        if any(core.runs(request.request_id) for core in self.cores):
            raise RequestRefused(f"a request {request.request_id!r} is running already: ids must be unique")
        self.cores[self._ranking(request)[0]].submit(request)

    def abort(self, request_id: str) -> None:
        if (core := self._core_of(request_id)) is not None:
            self.cores[core].abort(request_id)

    async def outputs(self) -> AsyncIterator[StepOutput]:
        while (step := await self._buffer.take()) is not None:
            yield step
        if self._failure is not None:
            raise self._failure

    def load(self) -> LoadReport:
        """Of all cores together. A step is that of the slowest."""
        return together([core.load() for core in self.cores])

    async def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        """A block is cached while any core has it."""
        union = CachedInAny(len(self.cores))
        async with aclosing(merged([core.kv_blocks() for core in self.cores])) as changes:
            async for core, change in changes:
                if (changed := union.apply(core, change)) is not None:
                    yield changed

    # KV that moves.

    @property
    def kv_address(self) -> str:
        """See `MovableEngine.kv_address`, and `kv.cores` for how the cores are told apart."""
        addresses = [core.kv_address for core in self.cores]
        return join_cores(addresses) if all(addresses) else ""

    def kv_agent(self) -> AgentPort:
        return _Agents([core.kv_agent() for core in self.cores])

    @property
    def kv_block_bytes(self) -> int:
        return self.cores[0].kv_block_bytes

    @property
    def prefixes(self) -> PrefixTransfers:
        """See `PrefixEngine`. Raises where a core's settings forbid them."""
        for core in self.cores:
            _ = core.prefixes
        return self._prefixes

    def export(
        self, request_id: str, migration_id: str, kv_token: str, on_progress: Callable[[ExportProgress], None]
    ) -> None:
        core = self._core_of(request_id)
        if core is None:
            raise RequestRefused(f"no request {request_id!r} runs here; it may have ended")

        def progressed(progress: ExportProgress) -> None:
            on_progress(replace(progress, block_ids=ids_of_core(core, progress.block_ids)))

        self.cores[core].export(request_id, migration_id, kv_token, progressed)

    async def pause(self, request_id: str) -> PausedRequest | None:
        if (core := self._core_of(request_id)) is None:
            return None
        paused = await self.cores[core].pause(request_id)
        return None if paused is None else replace(paused, block_ids=ids_of_core(core, paused.block_ids))

    def resume(self, request_id: str) -> None:
        if (core := self._core_of(request_id)) is not None:
            self.cores[core].resume(request_id)

    def withdraw(self, request_id: str, migration_id: str) -> None:
        for core in self.cores:
            core.withdraw(request_id, migration_id)

    def release(self, request_id: str, migration_id: str) -> None:
        if (core := self._core_of(request_id)) is not None:
            self.cores[core].release(request_id, migration_id)

    async def reserve(self, migration_id: str, request: EngineRequest) -> None:
        """See `MovableEngine.reserve`: in the first core that has room, the best one first."""
        first_refusal: RequestRefused | None = None
        for core in self._ranking(request):
            try:
                await self.cores[core].reserve(migration_id, request)
            except RequestRefused as refusal:
                first_refusal = first_refusal or refusal
            else:
                self._arriving[migration_id] = core
                return
        assert first_refusal is not None, "there are cores"
        raise first_refusal

    async def pull(
        self,
        migration_id: str,
        peer: str,
        first_block: int,
        peer_block_ids: tuple[int, ...],
        emitted_token_ids: tuple[int, ...],
        deadline_s: float,
    ) -> None:
        core = self._reserved(migration_id)
        await core.pull(migration_id, peer, first_block, peer_block_ids, emitted_token_ids, deadline_s)

    def activate(self, migration_id: str, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        core = self._reserved(migration_id)
        del self._arriving[migration_id]
        core.activate(migration_id, emitted_token_ids, computed_tokens)

    def discard(self, migration_id: str) -> None:
        self._arriving.pop(migration_id, None)
        for core in self.cores:
            core.discard(migration_id)

    def most_cached(self, request: EngineRequest) -> int:
        """The core whose prefix cache has most of it."""
        return max(range(len(self.cores)), key=lambda core: self._cached_tokens(core, request))

    def best(self, request: EngineRequest) -> int:
        """The core that the request should go to now."""
        return self._ranking(request)[0]

    def _cached_tokens(self, core: int, request: EngineRequest) -> int:
        return max(self.cores[core].cached_tokens(request), self._prefixes.fetched_tokens(core, request))

    def _ranking(self, request: EngineRequest) -> list[int]:
        """The cores, the best one first: the least product of new prefill tokens and batch size; among those that are
        idle the fewest tokens, then the fewest blocks in use."""
        context = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        scores = []
        for number, core in enumerate(self.cores):
            load = core.load()
            tokens = load.queued_prefill_tokens + max(1, context - self._cached_tokens(number, request))
            batch = load.running_requests + load.queued_requests
            scores.append((tokens * batch, tokens, load.kv_blocks_used, number))
        return [number for *_, number in sorted(scores)]

    def _core_of(self, request_id: str) -> int | None:
        return next((number for number, core in enumerate(self.cores) if core.runs(request_id)), None)

    def _reserved(self, migration_id: str) -> CoreEngine:
        core = self._arriving.get(migration_id)
        if core is None:
            raise RequestRefused(f"nothing is reserved for migration {migration_id}")
        return self.cores[core]

    async def _read_outputs(self, core: CoreEngine) -> None:
        try:
            async for step in core.outputs():
                for delta in step.deltas:
                    self._buffer.add(delta)
        except EngineFailed as failure:
            # The cores of one engine live and die together.
            self._failure = self._failure or failure
            self._buffer.close()
        except Exception as error:  # noqa: BLE001
            self._failure = self._failure or EngineFailed(f"the engine failed: {error!r}")
            self._buffer.close()


class _Prefixes:
    """Implements `PrefixTransfers`: of the core that has most of a prefix, and into the one that its request will
    get."""

    def __init__(self, engine: DataParallelEngine) -> None:
        self._engine = engine
        self._holds: dict[str, int] = {}
        self._fetched: deque[_Fetched] = deque(maxlen=_MOST_FETCHED)

    async def hold(
        self, hold_id: str, request: EngineRequest, most_blocks: int, wait_s: float, kv_token: str
    ) -> tuple[int, ...]:
        core = self._holds[hold_id] = self._engine.most_cached(request)
        prefixes = self._engine.cores[core].prefixes
        return ids_of_core(core, await prefixes.hold(hold_id, request, most_blocks, wait_s, kv_token))

    def let_go(self, hold_id: str) -> None:
        if (core := self._holds.pop(hold_id, None)) is not None:
            self._engine.cores[core].prefixes.let_go(hold_id)

    async def fetch(
        self, pull_id: str, request: EngineRequest, peer: str, peer_block_ids: tuple[int, ...], deadline_s: float
    ) -> int:
        core = self._engine.best(request)
        prefixes = self._engine.cores[core].prefixes
        pulled = await prefixes.fetch(pull_id, request, peer, peer_block_ids, deadline_s)
        # The request comes at once, and the news of its cached blocks a moment later.
        self._fetched.append(_Fetched(core, request, len(peer_block_ids) * self._engine.block_tokens))
        return pulled

    def fetched_tokens(self, core: int, request: EngineRequest) -> int:
        """Leading tokens of a request that were pulled into the core lately."""
        return max((each.tokens_of(request) for each in self._fetched if each.core == core), default=0)


class _Agents:
    """Implements `AgentPort`: the transfer agents of all cores."""

    def __init__(self, agents: Sequence[AgentPort]) -> None:
        self._agents = agents

    async def describe(self) -> AgentDescription:
        """Of the first core's, with the ports of all."""
        first, *others = [await agent.describe() for agent in self._agents]
        ports = tuple(port for each in others for port in (each.port, *each.more_ports))
        return replace(first, more_ports=first.more_ports + ports)

    async def status(self) -> AgentStatus:
        """Sums; what hinders one core hinders all, since nobody can choose the core."""
        each = await asyncio.gather(*(agent.status() for agent in self._agents))
        return AgentStatus(
            pulling=sum(status.pulling for status in each),
            pull_queue=sum(status.pull_queue for status in each),
            serving=sum(status.serving for status in each),
            serve_queue=sum(status.serve_queue for status in each),
            connections=sum(status.connections for status in each),
            exports=tuple(export for status in each for export in status.exports),
            exported_blocks=sum(status.exported_blocks for status in each),
            pulls_total=sum(status.pulls_total for status in each),
            failed_pulls_total=sum(status.failed_pulls_total for status in each),
            pulled_bytes_total=sum(status.pulled_bytes_total for status in each),
            pull_seconds_total=sum(status.pull_seconds_total for status in each),
            port=each[0].port,
            obstacle="; ".join(
                f"engine core {number}: {status.obstacle}" for number, status in enumerate(each) if status.obstacle
            ),
            reopened_total=sum(status.reopened_total for status in each),
            rejected_total=sum(status.rejected_total for status in each),
            more_ports=each[0].more_ports
            + tuple(port for status in each[1:] for port in (status.port, *status.more_ports)),
            ranks=tuple(
                replace(rank, core=core)
                for core, status in enumerate(each)
                for rank in status.ranks or (status.of_rank(core, 0),)
            ),
        )

    async def pull_reserved(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """Always `KvTransferRefused`: nothing is reserved for pulls that are ordered from outside."""
        raise KvTransferRefused(f"nothing is reserved under {transfer_id!r}")


class CachedInAny:
    """From the changes of several prefix caches to those of their union. Pure."""

    def __init__(self, caches: int) -> None:
        self._cached: tuple[set[int], ...] = tuple(set() for _ in range(caches))
        self._copies: Counter[int] = Counter()

    def apply(self, cache: int, change: KvBlocks) -> KvBlocks | None:
        """What changes in the union; None if nothing does. A cache that was cleared has lost what it had; the union
        is not cleared by that."""
        own = self._cached[cache]
        stored: dict[int, None] = {}
        removed: dict[int, None] = {}
        for block in (*(own if change.cleared else ()), *change.removed):
            if block in own:
                own.discard(block)
                self._copies[block] -= 1
                if not self._copies[block]:
                    del self._copies[block]
                    removed[block] = None
        for block in change.stored:
            if block not in own:
                own.add(block)
                self._copies[block] += 1
                if block in removed:
                    del removed[block]
                elif self._copies[block] == 1:
                    stored[block] = None
        if not stored and not removed:
            return None
        return KvBlocks(stored=tuple(stored), removed=tuple(removed))


async def merged(streams: Sequence[AsyncIterator[ItemT]]) -> AsyncGenerator[tuple[int, ItemT]]:
    """What comes from each of several streams, with the number of the stream, until all have ended. Raises what one of
    them raises."""
    items: asyncio.Queue[tuple[int, ItemT]] = asyncio.Queue(_MOST_WAITING)

    async def read(number: int, stream: AsyncIterator[ItemT]) -> None:
        async for item in stream:
            await items.put((number, item))

    readers = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    ended = asyncio.gather(*readers)
    try:
        while not (ended.done() and items.empty()):
            following = asyncio.create_task(items.get())
            await asyncio.wait((following, ended), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                yield following.result()
            else:
                following.cancel()
        await ended
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(ended, *readers, return_exceptions=True)


def together(loads: Sequence[LoadReport]) -> LoadReport:
    """The load of an instance, by that of its cores. Adapters are loaded in all cores alike."""
    first, decoding = loads[0], sum(load.decoding_requests for load in loads)
    added = {
        name: sum(getattr(load, name) for load in loads)
        for name in msgspec.structs.asdict(first)
        if isinstance(getattr(first, name), int)
    }
    weighted = sum(load.token_interval_ms * load.decoding_requests for load in loads)
    return msgspec.structs.replace(
        first,
        **added,
        step_ms=max(load.step_ms for load in loads),
        token_interval_ms=weighted / decoding if decoding else 0.0,
    )
