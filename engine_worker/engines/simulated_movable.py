"""The simulated engine with requests that move: its blocks travel through the KV transfer agent, as a real engine's."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.model.request import EngineRequest
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.engines.simulated_lora import SimulatedAdapters
from engine_worker.engines.simulated_media import TEXT_ONLY, SimulatedMedia
from engine_worker.engines.simulated_pace import Pace, steady
from engine_worker.engines.simulated_prefixes import SimulatedPrefixes
from engine_worker.host_tier.settings import NO_HOST_TIER, OF_THIS_MACHINE, HostStores, HostTierSettings
from engine_worker.kv.addresses import join
from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.fabric import KvFabric
from engine_worker.kv.layout import KvLayout
from engine_worker.kv.memory import BlockBytesMemory
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.ucx_worker import ucx_fabric
from mesh.errors import ConfigurationError, KvBlockCorrupt, KvTransferRefused, RequestRefused
from mesh.runtime import Clock, Entropy, SystemEntropy
from mesh.tasks import TaskSet
from simulator.cost.model import CostModel
from simulator.instance.config import InstanceConfig
from simulator.instance.sequence import SequenceState

log = logging.getLogger(__name__)

_MESSAGE_BLOCKS = 16
"""Its blocks are worked out when they are read and checked when they are written, on the event loop that also keeps the
steps' time: the loop is never held for longer than so many blocks take (about a millisecond)."""


@dataclass(slots=True)
class _Export:
    request_id: str
    kv_token: str = field(repr=False)
    on_progress: Callable[[ExportProgress], None]
    reported: ExportProgress | None = None


@dataclass(slots=True)
class _Import:
    """A request that is on its way here."""

    request: EngineRequest
    prompt_tokens: int


class MovableSimulatedEngine(SimulatedEngine):
    """A `MovableEngine` and a `PrefixEngine`. Where UCX is not installed it serves all the same, and moving says what
    is missing."""

    def __init__(
        self,
        config: InstanceConfig,
        cost: CostModel,
        clock: Clock,
        *,
        time_scale: float = 1.0,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        tokenizer_mode: str = "",
        media: SimulatedMedia = TEXT_ONLY,
        make_fabric: Callable[[KvTransferSettings], KvFabric] = ucx_fabric,
        kv_host: str = "127.0.0.1",
        kv_port: int = 0,
        entropy: Entropy | None = None,
        lora: SimulatedAdapters | None = None,
        host: HostTierSettings = NO_HOST_TIER,
        stores: HostStores = OF_THIS_MACHINE,
        pace: Pace = steady,
    ) -> None:
        """`make_fabric`: what its blocks travel over; `entropy`: what their connections are told apart by, the system's
        by default. `kv_host` and `kv_port`: where its transfer agent listens."""
        super().__init__(
            config,
            cost,
            clock,
            time_scale=time_scale,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            tokenizer_mode=tokenizer_mode,
            media=media,
            lora=lora,
            host=host,
            stores=stores,
            pace=pace,
        )
        self._make_fabric = make_fabric
        self._entropy = entropy or SystemEntropy()
        self._kv_host, self._kv_port = kv_host, kv_port
        self._agent: KvTransferAgent | None = None
        self._agent_missing = "the engine is not started"

    async def start(self) -> EngineLimits:
        """Begin to take steps, and listen for peers."""
        self._exports: dict[str, _Export] = {}
        self._imports: dict[str, _Import] = {}
        self._pauses: dict[str, asyncio.Future[PausedRequest | None]] = {}
        self._releases: dict[str, asyncio.Task[None]] = {}
        self._moves = TaskSet("simulated-engine")
        self._prefixes = SimulatedPrefixes(self.instance, self.kv_agent, self._moves, self.wake, lambda: self._host)
        agent = self._new_agent()
        try:
            await agent.start()
            self._agent = agent
        except ConfigurationError as error:
            self._agent_missing = str(error)
            log.warning("requests cannot move to or from this engine", extra={"reason": str(error)})
        return await super().start()

    async def stop(self) -> None:
        """End every request, the stepping and all transfers."""
        for pausing in self._pauses.values():
            pausing.cancel()
        for migration_id in list(self._imports):
            self.discard(migration_id)
        self._prefixes.stop()
        await super().stop()
        if self._agent is not None:
            await self._agent.stop()
        await self._moves.cancel()

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`; ends a pause that has not happened yet."""
        super().abort(request_id)
        self._end_pause(request_id, None)

    @property
    def transfers(self) -> tuple[str, ...]:
        """Number of requests that are exported, imported, paused or being released now."""
        exported = self._agent.exported if self._agent is not None else ()
        return (
            *(f"export {each}" for each in dict.fromkeys((*self._exports, *exported))),
            *(f"import {each}" for each in self._imports),
            *(f"pause of {each}" for each in self._pauses),
            *(f"release of {each}" for each in self._releases),
            *(f"load of {each}" for each in (self._host.loading if self._host is not None else ())),
            *self._prefixes.transfers,
        )

    @property
    def prefixes(self) -> SimulatedPrefixes:
        """See `PrefixEngine`; after `start`."""
        return self._prefixes

    @property
    def kv_address(self) -> str:
        """See `MovableEngine`. Raises `ConfigurationError` where UCX is not installed."""
        return join(self._kv_host, self.kv_agent().port)

    @property
    def kv_block_bytes(self) -> int:
        config: InstanceConfig = self.instance.config
        return config.block_bytes

    def export(
        self, request_id: str, migration_id: str, kv_token: str, on_progress: Callable[[ExportProgress], None]
    ) -> None:
        self.kv_agent()
        if self.instance.state_of(request_id) is SequenceState.ENDED:
            raise RequestRefused(f"request {request_id} is unknown here or has ended")
        export = _Export(request_id, kv_token, on_progress)
        self._exports[migration_id] = export
        self._tell_progress(migration_id, export)

    async def pause(self, request_id: str) -> PausedRequest | None:
        """See `MovableEngine`. A preempted request is paused once it decodes again."""
        if self.instance.state_of(request_id) is SequenceState.ENDED:
            return None
        pausing: asyncio.Future[PausedRequest | None] = asyncio.get_running_loop().create_future()
        self._pauses[request_id] = pausing
        return await pausing

    def resume(self, request_id: str) -> None:
        self._end_pause(request_id, None)
        if self.instance.state_of(request_id) is SequenceState.PAUSED:
            self.instance.resume(request_id)
            self.wake()

    def withdraw(self, request_id: str, migration_id: str) -> None:
        if self._exports.pop(migration_id, None) is not None:
            self._moves.spawn(self.kv_agent().withdraw(migration_id), name="withdraw")

    def release(self, request_id: str, migration_id: str) -> None:
        """See `MovableEngine`. The blocks are freed once nobody reads them any more."""
        self._exports.pop(migration_id, None)
        self._releases[request_id] = self._moves.spawn(self._release(request_id, migration_id), name="release")

    async def reserve(self, migration_id: str, request: EngineRequest) -> None:
        self.kv_agent()
        self._check_media(request)
        if (releasing := self._releases.get(request.request_id)) is not None:
            await releasing
        self._lora.use(request.request_id, request.adapter, self._request_ids)
        self.instance.admit_import(request, 0)
        self._imports[migration_id] = _Import(request, len(request.prompt_token_ids))

    async def pull(
        self,
        migration_id: str,
        peer: str,
        first_block: int,
        peer_block_ids: tuple[int, ...],
        emitted_token_ids: tuple[int, ...],
        deadline_s: float,
    ) -> None:
        """See `MovableEngine`. Blocks that the prefix cache has here are not pulled."""
        importing = self._imports[migration_id]
        block_tokens = self.instance.config.block_tokens
        stop_tokens = (first_block + len(peer_block_ids)) * block_tokens
        computed_tokens = min(stop_tokens, importing.prompt_tokens + len(emitted_token_ids))
        wanted = self.instance.extend_import(importing.request.request_id, computed_tokens)
        if not wanted.block_ids:
            return
        if wanted.first_block < first_block:
            raise KvBlockCorrupt(f"blocks {wanted.first_block} to {first_block} of {migration_id} were never sent")
        sent = peer_block_ids[wanted.first_block - first_block :]
        await self.kv_agent().pull(PeerAddress.parse(peer), migration_id, sent, wanted.block_ids, deadline_s)

    def activate(self, migration_id: str, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        importing = self._imports[migration_id]
        tokens = importing.prompt_tokens + len(emitted_token_ids)
        self.instance.complete_import(importing.request.request_id, tokens)
        del self._imports[migration_id]
        self.wake()

    def discard(self, migration_id: str) -> None:
        importing = self._imports.pop(migration_id, None)
        if importing is not None:
            self.instance.abort(importing.request.request_id)

    def _after_step(self) -> None:
        self._prefixes.step_over()
        for request_id in list(self._pauses):
            state = self.instance.state_of(request_id)
            if state is SequenceState.DECODE:
                self.instance.pause(request_id)
                self._end_pause(request_id, self._paused(request_id))
            elif state is SequenceState.ENDED:
                self._end_pause(request_id, None)
        for migration_id, export in list(self._exports.items()):
            if self.instance.state_of(export.request_id) is not SequenceState.ENDED:
                self._tell_progress(migration_id, export)

    def _paused(self, request_id: str) -> PausedRequest:
        exported = self.instance.export(request_id)
        for migration_id, export in self._exports.items():
            if export.request_id == request_id:
                self.kv_agent().export(migration_id, exported.block_ids, export.kv_token)
        emitted = self.instance.generated_token_ids(request_id)
        return PausedRequest(emitted, exported.computed_tokens, exported.block_ids)

    def _end_pause(self, request_id: str, answer: PausedRequest | None) -> None:
        pausing = self._pauses.pop(request_id, None)
        if pausing is not None and not pausing.done():
            pausing.set_result(answer)

    def _tell_progress(self, migration_id: str, export: _Export) -> None:
        exported = self.instance.export(export.request_id)
        full_blocks = exported.computed_tokens // self.instance.config.block_tokens
        emitted_tokens = self.instance.generated_tokens(export.request_id)
        reported = export.reported
        if (
            reported is not None
            and len(reported.block_ids) == full_blocks
            and bool(reported.emitted_tokens) == bool(emitted_tokens)
        ):
            return
        progress = ExportProgress(exported.block_ids[:full_blocks], emitted_tokens)
        known = len(reported.block_ids) if reported is not None else 0
        if reported is not None and progress.block_ids[:known] != reported.block_ids:
            known = 0  # it was preempted and has other blocks now
        self.kv_agent().export(migration_id, progress.block_ids[known:], export.kv_token)
        export.reported = progress
        export.on_progress(progress)

    async def _release(self, request_id: str, migration_id: str) -> None:
        try:
            await self.kv_agent().withdraw(migration_id)
        finally:
            self.instance.abort(request_id)
            self._releases.pop(request_id, None)
            self.wake()

    def kv_agent(self) -> KvTransferAgent:
        if self._agent is None:
            raise KvTransferRefused(self._agent_missing)
        return self._agent

    def _new_agent(self) -> KvTransferAgent:
        instance = self.instance
        config: InstanceConfig = instance.config
        layout = KvLayout("simulated", "simulated", config.block_tokens, (config.block_bytes,))
        message_bytes = _MESSAGE_BLOCKS * config.block_bytes
        settings = KvTransferSettings(
            host=self._kv_host,
            port=self._kv_port,
            message_bytes=message_bytes,
            gathered_bytes=message_bytes,
            direct_bytes=message_bytes,
        )
        memory = BlockBytesMemory(layout, config.kv_blocks, instance.read_block, instance.write_block)
        return KvTransferAgent(
            memory, settings, self._clock, self._entropy, agent_id="simulated", make_fabric=self._make_fabric
        )
