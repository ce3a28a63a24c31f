"""The bridge in the engine core between vLLM's two connector sides, the transfer agent and the worker's process.

The agent and the control socket live on an event loop of their own thread. vLLM's engine loop never waits for it,
except before it overwrites blocks that a peer may be reading (`withdraw_now`).
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from engine_worker.engines.vllm.connector.messages import (
    Answer,
    AskStatus,
    Call,
    Command,
    Describe,
    Described,
    ExpectPause,
    Export,
    FreeBlocks,
    FromCore,
    LoadOutcome,
    OrderPull,
    PausedNotice,
    Published,
    Pulled,
    Release,
    Stage,
    Status,
    Unstage,
    Value,
    Withdraw,
)
from engine_worker.engines.vllm.connector.staging import StagingTable
from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.settings import KvTransferSettings
from mesh.errors import EngineFailed, KvTransferRefused, PenstockError
from mesh.runtime import SystemClock

log = logging.getLogger(__name__)

_START_S = 30.0
_WITHDRAW_S = 5.0
"""Far more than an agent's own bound."""
_MAX_OUTCOMES = 256
"""Failed loads that nobody has asked about."""


@dataclass(frozen=True, slots=True)
class Exported:
    """To the scheduler side: publish the request's blocks."""

    migration_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Unexported:
    """To the scheduler side: publish no more of them."""

    migration_id: str


@dataclass(frozen=True, slots=True)
class Sent:
    """To the scheduler side: nobody reads the request's blocks any more."""

    internal_id: str


@dataclass(frozen=True, slots=True)
class Received:
    """To the scheduler side: a carrier's load is over."""

    carrier_id: str
    failed_blocks: tuple[int, ...]


InboxEvent: TypeAlias = Exported | Unexported | Sent | Received


class CoreBridge:
    """One for each engine core. Methods without `async` are called from vLLM's engine loop, those with it run on the
    bridge's own."""

    def __init__(self, endpoint: str) -> None:
        self.inbox: deque[InboxEvent] = deque()
        """For the scheduler side, which empties it with every step."""
        self.pauses: set[str] = set()
        """Requests whose next abort is a pause."""
        self.internal_id: Callable[[str], str] = lambda request_id: ""
        self.free_blocks: Callable[[], int] = lambda: 0
        self._endpoint = endpoint
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._agent: KvTransferAgent | None = None
        self._socket: Any = None
        self._staging: StagingTable | None = None
        self._exports: set[str] = set()
        self._held: dict[str, list[str]] = {}
        """Exports of each paused request, by vLLM's id."""
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._stagings: dict[str, asyncio.Task[Any]] = {}
        self._outcomes: dict[str, PenstockError] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # vLLM's engine loop.

    def start(self, memory: Any, *, port: int, device: Any) -> None:
        """Serve this memory. Raises what the agent's start raises."""
        self._staging = StagingTable(range(memory.first_staging, memory.blocks))
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-agent", daemon=True)
        self._thread.start()
        settings = KvTransferSettings(port=port, device=device)
        asyncio.run_coroutine_threadsafe(self._start(memory, settings), self._loop).result(_START_S)

    def publish(self, migration_id: str, internal_id: str, first_block: int, block_ids: tuple[int, ...]) -> None:
        """Let peers read more blocks of an exported request."""
        self._loop.call_soon_threadsafe(self._publish, migration_id, first_block, block_ids)

    def hold(self, internal_id: str, migration_ids: list[str], notice: PausedNotice) -> None:
        """The request is paused; tell the worker, and keep the blocks until it says `Release`."""
        self._loop.call_soon_threadsafe(self._hold, internal_id, migration_ids, notice)

    def end_exports(self, internal_id: str, migration_ids: list[str]) -> None:
        """The request ended by itself: have its blocks freed once no peer reads them."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._free(internal_id, migration_ids)))

    def withdraw_now(self, migration_ids: Sequence[str]) -> None:
        """Return when no peer reads the blocks of these exports any more."""
        withdrawing = self._withdraw_all(migration_ids)
        asyncio.run_coroutine_threadsafe(withdrawing, self._loop).result(_WITHDRAW_S)

    def load(self, order: Any) -> None:
        """Begin a carrier's load; `Received` follows."""
        self._loop.call_soon_threadsafe(self._begin_load, order)

    def cancel_load(self, carrier_id: str) -> None:
        """The carrier is gone; `Received` follows all the same if the load is under way."""
        self._loop.call_soon_threadsafe(self._cancel_load, carrier_id)

    def staged(self, migration_id: str) -> tuple[int, ...]:
        """Ids of the staging blocks that a migration holds, all of them filled; empty if none."""
        return () if self._staging is None else self._staging.of(migration_id)

    def unstage_later(self, migration_id: str) -> None:
        """The staged blocks have been used, or never will be."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._unstage(migration_id)))

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
        self._agent = KvTransferAgent(
            memory, settings, SystemClock(), agent_id=f"vllm-{self._endpoint.rsplit('/', 1)[-1]}"
        )
        await self._agent.start()
        self._socket = zmq.asyncio.Context.instance().socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        self._socket.connect(self._endpoint)
        self._spawn(self._listen())

    async def _stop(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._agent is not None:
            await self._agent.stop()
        self._socket.close()

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(Call)
        while True:
            call = decoder.decode(await self._socket.recv())
            self._spawn(self._answer(call))

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
                return Described(await self._running_agent.describe())
            case AskStatus():
                return Status(await self._running_agent.status())
            case OrderPull(host, port, transfer_id, source, target, deadline_s):
                peer = PeerAddress(host, port)
                return Pulled(await self._running_agent.pull_reserved(peer, transfer_id, source, target, deadline_s))
            case FreeBlocks():
                return self.free_blocks()
            case ExpectPause(request_id):
                internal_id = self.internal_id(request_id)
                if internal_id:
                    self.pauses.add(request_id)
                return internal_id
            case Export(request_id, migration_id):
                self._exports.add(migration_id)
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
                error = self._outcomes.pop(carrier_id, None)
                if error is not None:
                    raise error
        return 0

    def _publish(self, migration_id: str, first_block: int, block_ids: tuple[int, ...]) -> None:
        if migration_id in self._exports:
            self._running_agent.export(migration_id, block_ids)
            self._send(Published(migration_id, first_block, block_ids))

    def _hold(self, internal_id: str, migration_ids: list[str], notice: PausedNotice) -> None:
        self._held[internal_id] = migration_ids
        self._send(notice)

    async def _free(self, internal_id: str, migration_ids: list[str]) -> None:
        await self._withdraw_all(migration_ids)
        self.inbox.append(Sent(internal_id))

    async def _withdraw_all(self, migration_ids: Sequence[str]) -> None:
        self._exports.difference_update(migration_ids)
        for migration_id in migration_ids:
            await self._running_agent.withdraw(migration_id)

    def _begin_load(self, order: Any) -> None:
        task = self._spawn(self._load(order))
        self._loads[order.carrier_id] = task
        # Reported here and not in the task, which does not even begin if it is cancelled first.
        task.add_done_callback(lambda done: self._load_ended(order, done))

    def _cancel_load(self, carrier_id: str) -> None:
        task = self._loads.get(carrier_id)
        if task is not None:
            task.cancel()

    async def _load(self, order: Any) -> None:
        await self._running_agent.pull(
            _address(order.peer), order.migration_id, order.peer_block_ids, order.block_ids, order.deadline_s
        )

    def _load_ended(self, order: Any, task: "asyncio.Task[None]") -> None:
        del self._loads[order.carrier_id]
        failed: tuple[int, ...] = ()
        if not task.cancelled() and (error := task.exception()) is not None:
            failed = order.block_ids
            while len(self._outcomes) >= _MAX_OUTCOMES:
                del self._outcomes[next(iter(self._outcomes))]
            known = isinstance(error, PenstockError)
            self._outcomes[order.load_id] = error if known else EngineFailed(repr(error))  # type: ignore[assignment]
        self.inbox.append(Received(order.carrier_id, failed))

    async def _stage(self, order: Stage) -> None:
        assert self._staging is not None, "started before it is asked"
        if order.migration_id in self._stagings:
            raise KvTransferRefused(f"migration {order.migration_id} is pulling already: one pull at a time")
        task = self._spawn(self._pull_staged(order, self._staging))
        self._stagings[order.migration_id] = task
        try:
            await asyncio.shield(task)
        finally:
            self._stagings.pop(order.migration_id, None)

    async def _pull_staged(self, order: Stage, staging: StagingTable) -> None:
        targets = staging.take(order.migration_id, order.keep, len(order.peer_block_ids))
        await self._running_agent.pull(
            _address(order.peer), order.migration_id, order.peer_block_ids, targets, order.deadline_s
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
    def _running_agent(self) -> KvTransferAgent:
        assert self._agent is not None, "started before it is asked"
        return self._agent

    def _send(self, message: FromCore) -> None:
        self._spawn(self._socket.send(msgspec.msgpack.encode(message)))

    def _spawn(self, work: Any) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = self._loop.create_task(_awaited(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _awaited(work: Any) -> Any:
    return await work


_bridges: dict[str, CoreBridge] = {}


def bridge_of(endpoint: str) -> CoreBridge:
    """The bridge that both sides of the connector share; vLLM makes them one after the other, in one process."""
    bridge = _bridges.get(endpoint)
    if bridge is None:
        bridge = _bridges[endpoint] = CoreBridge(endpoint)
    return bridge


def _address(peer: str) -> PeerAddress:
    host, _, port = peer.rpartition(":")
    if not host or not port.isdigit():
        raise KvTransferRefused(f"{peer!r} is no host:port of a KV transfer agent")
    return PeerAddress(host, int(port))
