"""The bridge in the engine core between vLLM's two connector sides, the transfer agent and the worker's process.

The agent and the control socket live on an event loop of their own thread. vLLM's engine loop never waits for it,
except before it overwrites blocks that a peer may be reading (`withdraw_now`).
"""

import asyncio
import hmac
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from engine_worker.engines.vllm.connector.bridge_tasks import BridgeTasks
from engine_worker.engines.vllm.connector.control import BEAT_S, Control, OwnControl, ServedControl
from engine_worker.engines.vllm.connector.endpoint import TOKEN_VARIABLE
from engine_worker.engines.vllm.connector.host_copies import HostCopies, open_host_store
from engine_worker.engines.vllm.connector.inbox import (
    Exported,
    Hurried,
    InboxEvent,
    Received,
    Sent,
    Unexported,
    Unheld,
)
from engine_worker.engines.vllm.connector.messages import (
    Answer,
    AskStatus,
    Call,
    Capture,
    Command,
    Describe,
    Described,
    EndedInstead,
    ExpectPause,
    Export,
    FreeBlocks,
    FromCore,
    Held,
    Hold,
    HoldNow,
    HostLoaded,
    LetGo,
    LoadOutcome,
    Notice,
    OrderPull,
    PausedNotice,
    Published,
    Pulled,
    Release,
    Stage,
    States,
    Status,
    Unstage,
    Value,
    Withdraw,
)
from engine_worker.engines.vllm.connector.orders import HeldPrefix
from engine_worker.engines.vllm.connector.rank_messages import HoldReady, LoadReady, RankEvent, Unstaged
from engine_worker.engines.vllm.connector.ranks import RankAgents
from engine_worker.engines.vllm.connector.staging import StagingTable, staging_ids
from engine_worker.host_tier.disk_tier import DiskTier
from engine_worker.host_tier.settings import HostTierSettings, open_disk
from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.settings import KvTransferSettings
from mesh.errors import ConfigurationError, EngineFailed, KvTransferRefused, PenstockError
from mesh.runtime import SystemClock, SystemEntropy, SystemThreads

log = logging.getLogger(__name__)

_START_S = 30.0
_WITHDRAW_S = 5.0
"""Far more than an agent's own bound."""
_HOST_LOOK_S = 0.05
"""Between two looks at what other instances did to the host's store."""
_SECRET_BYTES = 16
_MAX_OUTCOMES = 256
"""Loads that nobody has asked about."""


class CoreBridge:
    """One for each engine core. Methods without `async` are called from vLLM's engine loop, those with it run on the
    bridge's own."""

    def __init__(self, endpoint: str, *, listens: bool = False) -> None:
        """`listens`: workers come to the endpoint, instead of the one worker that has it."""
        self.inbox: deque[InboxEvent] = deque()
        """For the scheduler side, which empties it with every step."""
        self.pauses: set[str] = set()
        """Requests whose next abort is a pause."""
        self.holds: dict[str, str] = {}
        """Tokens of prefixes that are to be held, until they are let go; vLLM's engine loop looks who has one."""
        self.host: HostCopies | None = None
        """To and from the host's store, if there is one."""
        self.has_ranks = False
        """Whether the KV is in other processes, each with a `RankBridge`."""
        self.obstacle = ""
        """Why no request can move here."""
        self.internal_id: Callable[[str], str] = lambda request_id: ""
        self.free_blocks: Callable[[], int] = lambda: 0
        self._mark_engine: Callable[[], None] = lambda: None
        """See `EngineMemory.mark_engine`."""
        self.capture: Callable[[int], str] = lambda every_steps: "this process has no model"
        """See `WorkerSide.capture`."""
        self._secret = SystemEntropy().token_hex(_SECRET_BYTES) if listens else ""
        self._listens = listens
        self._endpoint = endpoint
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._agent: KvTransferAgent | RankAgents | None = None
        self._share: Callable[[str, tuple[int, ...], str], Awaitable[None]] = self._share_own
        self._telling = asyncio.Lock()
        """What the worker hears about blocks keeps its order; the lock is given by turns."""
        self._control: Control | None = None
        self._staging: StagingTable | None = None
        self._exports: dict[str, str] = {}  # to the token of each
        self._held: dict[str, list[str]] = {}
        """Exports of each paused request, by vLLM's id."""
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._stagings: dict[str, asyncio.Task[Any]] = {}
        self._outcomes: dict[str, PenstockError | int] = {}
        self._cancelled_loads: dict[str, None] = {}
        """Carriers that ended before all ranks were ready to load."""
        self._tasks = BridgeTasks()

    # vLLM's engine loop.

    def start(self, memory: Any, settings: KvTransferSettings) -> None:
        """Serve this memory. Raises what the agent's start raises."""
        self._staging = StagingTable(range(memory.first_staging, memory.blocks))
        self._mark_engine = memory.mark_engine
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-agent", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(memory, settings), self._loop).result(_START_S)

    def start_ranks(self, *, blocks: int, staging_blocks: int, ranks: int) -> None:
        """Instead of `start`, in the engine core of a model that is spread over processes. Raises `EngineFailed` where
        one of them does not come."""
        self.has_ranks = True
        self._staging = StagingTable(staging_ids(blocks, staging_blocks))
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-ranks", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start_ranks(ranks), self._loop).result(2 * _START_S)

    def serve_host(self, memory: Any, key: str, settings: HostTierSettings) -> None:
        """Keep blocks of this memory in the host's store, too, if it can be opened. After `start`."""
        store = open_host_store(key, memory.layout, memory.layout.block_bytes, settings)
        if store is not None:
            layout, clock = memory.layout, SystemClock()
            disk_store = open_disk(f"{key}/{layout}", layout.block_bytes, settings)
            disk = None if disk_store is None else DiskTier(store, disk_store, clock, SystemThreads())
            self.host = HostCopies(memory, store, self._loop, self.inbox.append, self._send, clock, disk)
            if disk is not None:
                self._loop.call_soon_threadsafe(self._tasks.spawn, disk.save())
            self._loop.call_soon_threadsafe(self._tasks.spawn, self.host.follow(_HOST_LOOK_S))

    def is_ours(self, parameters: Any) -> bool:
        """Whether a request's parameters come from the worker. A server that runs by itself has other clients, who must
        not have it pull blocks from anywhere."""
        if not self._listens:
            return True
        secret = parameters.get("secret", "") if isinstance(parameters, dict) else ""
        return isinstance(secret, str) and hmac.compare_digest(secret.encode(), self._secret.encode())

    def publish(self, migration_id: str, internal_id: str, first_block: int, block_ids: tuple[int, ...]) -> None:
        """Let peers read more blocks of an exported request."""
        self._mark_engine()
        self._loop.call_soon_threadsafe(self._publish, migration_id, first_block, block_ids)

    def publish_hold(self, held: HeldPrefix) -> None:
        """Let peers read the blocks of a held prefix, and tell the worker."""
        self._mark_engine()
        self._loop.call_soon_threadsafe(self._publish_hold, held.hold_id, held.block_ids)

    def hold(self, internal_id: str, migration_ids: list[str], notice: PausedNotice) -> None:
        """The request is paused; tell the worker, and keep the blocks until it says `Release`."""
        self._loop.call_soon_threadsafe(self._hold, internal_id, migration_ids, notice)

    def tell_ended(self, request_id: str) -> None:
        """A request that was to be paused has ended."""
        self._loop.call_soon_threadsafe(self._send, EndedInstead(request_id))

    def tell_nothing_loaded(self, request_id: str) -> None:
        """The host's store has nothing that the request lacks."""
        self._loop.call_soon_threadsafe(self._send, HostLoaded(request_id, 0, 0.0))

    def tell_states(self, content: bytes) -> None:
        """Hidden states of a step; from any thread."""
        self._loop.call_soon_threadsafe(self._send, States(content))

    def end_exports(self, internal_id: str, migration_ids: list[str]) -> None:
        """The request ended by itself: have its blocks freed once no peer reads them."""
        self._loop.call_soon_threadsafe(lambda: self._tasks.spawn(self._free(internal_id, migration_ids)))

    def withdraw_now(self, migration_ids: Sequence[str]) -> None:
        """Return when no peer reads the blocks of these exports any more."""
        withdrawing = self._withdraw_all(migration_ids)
        asyncio.run_coroutine_threadsafe(withdrawing, self._loop).result(_WITHDRAW_S)

    def load(self, order: Any) -> None:
        """Begin a carrier's load; `Received` follows."""
        self._mark_engine()
        self._loop.call_soon_threadsafe(self._begin_load, order)

    def cancel_load(self, carrier_id: str) -> None:
        """The carrier is gone; `Received` follows all the same if the load is under way."""
        self._loop.call_soon_threadsafe(self._cancel_load, carrier_id)

    def staged(self, migration_id: str) -> tuple[int, ...]:
        """Ids of the staging blocks that a migration holds, all of them filled; empty if none."""
        return () if self._staging is None else self._staging.of(migration_id)

    def unstage_later(self, migration_id: str) -> None:
        """The staged blocks have been used, or never will be."""
        self._loop.call_soon_threadsafe(lambda: self._tasks.spawn(self._unstage(migration_id)))

    def stop(self) -> None:
        """End the agent and the thread."""
        if self._thread is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_WITHDRAW_S)
        except TimeoutError:
            log.warning("the KV transfer agent did not stop in time; the process leaves without it")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WITHDRAW_S)
        self._thread = None

    # The bridge's loop.

    async def _start(self, memory: Any, settings: KvTransferSettings) -> None:
        memory.use_in_this_thread()
        self._agent = KvTransferAgent(
            memory, settings, SystemClock(), SystemEntropy(), agent_id=f"vllm-{self._endpoint.rsplit('/', 1)[-1]}"
        )
        await self._agent.start()
        self._open_control()

    async def _start_ranks(self, ranks: int) -> None:
        self._agent = agents = RankAgents(
            self._endpoint, ranks, self._all_said, lambda content: self._send(States(content))
        )
        self._share = agents.share
        await agents.start(_START_S)
        self._open_control()

    def _open_control(self) -> None:
        if self._listens:
            token = os.environ.get(TOKEN_VARIABLE, "")
            self._control = ServedControl(self._endpoint, token, self._secret, SystemClock(), self._let_all_go)
            self._tasks.spawn(self._watch(self._control))
        else:
            self._control = OwnControl(self._endpoint)
        self._tasks.spawn(self._listen(self._control))

    async def _stop(self) -> None:
        await self._tasks.cancel()
        if self.host is not None:
            await self.host.stop()
        if self._agent is not None:
            await self._agent.stop()
        await self._tasks.cancel()  # what these two have said, and nobody hears any more
        if self._control is not None:
            self._control.close()

    async def _listen(self, control: Control) -> None:
        while True:
            self._tasks.spawn(self._answer(await control.receive()))

    async def _watch(self, control: Control) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if control.has_fallen_silent():
                self._let_all_go()

    def _let_all_go(self) -> None:
        """The attached worker is gone: nobody will take back what it has asked for."""
        self.pauses.clear()
        for internal_id in tuple(self._held):
            self._tasks.spawn(self._free(internal_id, self._held.pop(internal_id)))
        for migration_id in tuple(self._exports):
            self._tasks.spawn(self._carry_out(Withdraw(migration_id)))
        for hold_id in tuple(self.holds):
            self._tasks.spawn(self._carry_out(LetGo(hold_id)))
        for migration_id in () if self._staging is None else self._staging.holders:
            self._tasks.spawn(self._unstage(migration_id))
        self._tasks.spawn(self._carry_out(Capture(0)))

    async def _answer(self, call: Call) -> None:
        try:
            self._send(Answer(call.number, await self._carry_out(call.command)))
        except PenstockError as error:
            self._send(Answer(call.number, error=type(error).__name__, message=str(error)))
        except asyncio.CancelledError:
            self._send(Answer(call.number, error="EngineFailed", message="it was cancelled"))
            raise
        except Exception as error:
            # What the KV memory raises may be anything; without an answer the worker's process would wait for ever.
            log.exception("a command failed", extra={"command": type(call.command).__name__})
            self._send(Answer(call.number, error="EngineFailed", message=f"the engine core failed: {error!r}"))

    async def _carry_out(self, command: Command) -> Value:
        match command:
            case Describe():
                if self.obstacle:
                    raise ConfigurationError(self.obstacle)
                return Described(await self._running_agent.describe())
            case AskStatus():
                return Status(await self._running_agent.status())
            case OrderPull(address, transfer_id, source, target, deadline_s):
                peer = PeerAddress.parse(address)
                return Pulled(await self._running_agent.pull_reserved(peer, transfer_id, source, target, deadline_s))
            case FreeBlocks():
                return self.free_blocks()
            case Capture(every_steps):
                ranks = self._agent if isinstance(self._agent, RankAgents) else None
                return self.capture(every_steps) if ranks is None else await ranks.capture(every_steps)
            case ExpectPause(request_id):
                # First, so that one which is here when it is looked for ends as a pause, or says that it has ended.
                self.pauses.add(request_id)
                internal_id = self.internal_id(request_id)
                if not internal_id:
                    self.pauses.discard(request_id)
                return internal_id
            case Export(request_id, migration_id, kv_token):
                self._exports[migration_id] = kv_token
                self.inbox.append(Exported(migration_id, request_id))
            case Withdraw(migration_id):
                self.inbox.append(Unexported(migration_id))
                await self._withdraw_all([migration_id])
            case Release(internal_id):
                migration_ids = self._held.pop(internal_id, None)
                if migration_ids is not None:
                    await self._free(internal_id, migration_ids)
            case Stage():
                await self._stage(command)
            case Unstage(migration_id):
                await self._unstage(migration_id)
            case LoadOutcome(carrier_id):
                outcome = self._outcomes.pop(carrier_id, 0)
                if isinstance(outcome, PenstockError):
                    raise outcome
                return outcome
            case Hold(hold_id, kv_token):
                self.holds[hold_id] = kv_token
            case HoldNow(hold_id):
                self.inbox.append(Hurried(hold_id))
            case LetGo(hold_id):
                self.holds.pop(hold_id, None)
                await self._running_agent.withdraw(hold_id)
                self.inbox.append(Unheld(hold_id))
        return 0

    def _all_said(self, event: RankEvent) -> None:
        match event:
            case LoadReady(_, order):
                if order.carrier_id in self._cancelled_loads:
                    del self._cancelled_loads[order.carrier_id]
                    self.inbox.append(Received(order.carrier_id, ()))
                else:
                    self._begin_load(order)
            case HoldReady(_, hold_id, block_ids):
                self._publish_hold(hold_id, block_ids)
            case Unstaged(_, migration_id):
                self._tasks.spawn(self._unstage(migration_id))

    def _publish_hold(self, hold_id: str, block_ids: tuple[int, ...]) -> None:
        if hold_id in self.holds:
            self._tasks.spawn(self._publish_in_turn(self.holds, hold_id, block_ids, Held(hold_id, block_ids)))

    def _publish(self, migration_id: str, first_block: int, block_ids: tuple[int, ...]) -> None:
        if migration_id in self._exports:
            published = Published(migration_id, first_block, block_ids)
            self._tasks.spawn(self._publish_in_turn(self._exports, migration_id, block_ids, published))

    async def _publish_in_turn(
        self, wanted: Mapping[str, str], export_id: str, block_ids: tuple[int, ...], notice: Notice
    ) -> None:
        async with self._telling:
            if (token := wanted.get(export_id)) is not None:  # still
                await self._share(export_id, block_ids, token)
                self._send(notice)

    async def _share_own(self, export_id: str, block_ids: tuple[int, ...], kv_token: str) -> None:
        assert isinstance(self._agent, KvTransferAgent), "it was started with memory"
        self._agent.export(export_id, block_ids, kv_token)

    def _hold(self, internal_id: str, migration_ids: list[str], notice: PausedNotice) -> None:
        self._held[internal_id] = migration_ids
        self._tasks.spawn(self._tell_in_turn(notice))

    async def _tell_in_turn(self, notice: Notice) -> None:
        async with self._telling:
            self._send(notice)

    async def _free(self, internal_id: str, migration_ids: list[str]) -> None:
        await self._withdraw_all(migration_ids)
        self.inbox.append(Sent(internal_id))

    async def _withdraw_all(self, migration_ids: Sequence[str]) -> None:
        withdrawn = [(self._exports.pop(each, None), each)[1] for each in migration_ids]
        for migration_id in withdrawn:
            await self._running_agent.withdraw(migration_id)

    def _begin_load(self, order: Any) -> None:
        task = self._tasks.spawn(self._load(order))
        self._loads[order.carrier_id] = task
        # Reported here and not in the task, which does not even begin if it is cancelled first.
        task.add_done_callback(lambda done: self._load_ended(order, done))

    def _cancel_load(self, carrier_id: str) -> None:
        task = self._loads.get(carrier_id)
        if task is not None:
            task.cancel()
        elif self.has_ranks:
            self._cancelled_loads[carrier_id] = None
            while len(self._cancelled_loads) > _MAX_OUTCOMES:
                del self._cancelled_loads[next(iter(self._cancelled_loads))]

    async def _load(self, order: Any) -> None:
        await self._running_agent.pull(
            PeerAddress.parse(order.peer), order.migration_id, order.peer_block_ids, order.block_ids, order.deadline_s
        )

    def _load_ended(self, order: Any, task: "asyncio.Task[None]") -> None:
        del self._loads[order.carrier_id]
        failed: tuple[int, ...] = ()
        outcome: PenstockError | int = len(order.block_ids)
        if not task.cancelled() and (error := task.exception()) is not None:
            failed = order.block_ids
            outcome = error if isinstance(error, PenstockError) else EngineFailed(repr(error))
        if not task.cancelled():
            while len(self._outcomes) >= _MAX_OUTCOMES:
                del self._outcomes[next(iter(self._outcomes))]
            self._outcomes[order.load_id] = outcome
        self.inbox.append(Received(order.carrier_id, failed))

    async def _stage(self, order: Stage) -> None:
        assert self._staging is not None, "started before it is asked"
        if order.migration_id in self._stagings:
            raise KvTransferRefused(f"migration {order.migration_id} is pulling already: one pull at a time")
        task = self._tasks.spawn(self._pull_staged(order, self._staging))
        self._stagings[order.migration_id] = task
        try:
            await asyncio.shield(task)
        finally:
            self._stagings.pop(order.migration_id, None)

    async def _pull_staged(self, order: Stage, staging: StagingTable) -> None:
        targets = staging.take(order.migration_id, order.keep, len(order.peer_block_ids))
        await self._running_agent.pull(
            PeerAddress.parse(order.peer), order.migration_id, order.peer_block_ids, targets, order.deadline_s
        )
        staging.filled(order.migration_id)

    async def _unstage(self, migration_id: str) -> None:
        task = self._stagings.get(migration_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self._staging is not None:
            self._staging.free(migration_id)

    @property
    def _running_agent(self) -> KvTransferAgent | RankAgents:
        assert self._agent is not None, "started before it is asked"
        return self._agent

    def _send(self, message: FromCore) -> None:
        if self._control is not None:
            self._tasks.spawn(self._control.send(message))


_bridges: dict[str, CoreBridge] = {}


def bridge_of(endpoint: str, *, listens: bool) -> CoreBridge:
    """The bridge that both sides of the connector share; vLLM makes them one after the other, in one process."""
    bridge = _bridges.get(endpoint)
    if bridge is None:
        bridge = _bridges[endpoint] = CoreBridge(endpoint, listens=listens)
    return bridge
