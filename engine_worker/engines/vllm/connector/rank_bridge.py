"""The bridge in one rank's process, where a model is spread over several: between the connector's worker side there,
this rank's KV transfer agent, and the engine core (`ranks`)."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from engine_worker.engines.vllm.connector.bridge_tasks import BridgeTasks
from engine_worker.engines.vllm.connector.orders import HeldPrefix, Load
from engine_worker.engines.vllm.connector.rank_messages import (
    FromRank,
    HoldReady,
    LoadReady,
    RankAnswer,
    RankAskStatus,
    RankCall,
    RankCancel,
    RankCapture,
    RankCapturing,
    RankCommand,
    RankExport,
    RankHello,
    RankPull,
    RankPulled,
    RankStates,
    RankStatus,
    RankValue,
    RankWithdraw,
    ToRank,
    Unstaged,
)
from engine_worker.engines.vllm.connector.ranks import CANCELLED, RANKS_SUFFIX
from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.settings import KvTransferSettings
from mesh.errors import PenstockError
from mesh.runtime import SystemClock, SystemEntropy

log = logging.getLogger(__name__)

_START_S = 30.0
_WITHDRAW_S = 5.0
_MOST_BROKEN = 1024
"""Exports of preempted requests that are remembered."""


class RankBridge:
    """One for each rank. Methods without `async` are called from vLLM's thread, those with it run on the bridge's own
    loop."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._memory: Any = None
        self._agent: KvTransferAgent | None = None
        self._socket: Any = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks = BridgeTasks()
        self._broken: dict[str, None] = {}
        self.capture: Callable[[int], str] = lambda every_steps: "this process has no model"
        """See `WorkerSide.capture`."""

    # vLLM's thread.

    def start(self, memory: Any, settings: KvTransferSettings) -> None:
        """Serve this memory. Raises what the agent's start raises."""
        self._memory = memory
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-agent", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(settings), self._loop).result(_START_S)

    def load(self, order: Load) -> None:
        """Whatever used the blocks has been launched: they may be filled, when it is so at all ranks."""
        self._memory.mark_engine()
        self._say_later(LoadReady(self._rank, order))

    def publish_hold(self, held: HeldPrefix) -> None:
        """What computes these blocks has been launched: peers may read them, when it is so at all ranks."""
        self._memory.mark_engine()
        self._say_later(HoldReady(self._rank, held.hold_id, held.block_ids))

    def unstage_later(self, migration_id: str) -> None:
        """The staged blocks have been used, or never will be."""
        self._say_later(Unstaged(self._rank, migration_id))

    def tell_states(self, content: bytes) -> None:
        """Hidden states of a step; from any thread."""
        self._say_later(RankStates(self._rank, content))

    def withdraw_now(self, migration_ids: Sequence[str]) -> None:
        """Return when no peer reads this rank's part of these exports any more, nor ever will."""
        asyncio.run_coroutine_threadsafe(self._break(tuple(migration_ids)), self._loop).result(_WITHDRAW_S)

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

    async def _start(self, settings: KvTransferSettings) -> None:
        self._memory.use_in_this_thread()
        name = f"vllm-{self._endpoint.rsplit('/', 1)[-1]}-{self._rank}"
        self._agent = KvTransferAgent(self._memory, settings, SystemClock(), SystemEntropy(), agent_id=name)
        await self._agent.start()
        self._socket = zmq.asyncio.Context.instance().socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        self._socket.connect(self._endpoint + RANKS_SUFFIX)
        await self._say(RankHello(self._rank, await self._agent.describe()))
        self._tasks.spawn(self._listen())

    async def _stop(self) -> None:
        await self._tasks.cancel()
        if self._agent is not None:
            await self._agent.stop()
        self._socket.close()

    async def _listen(self) -> None:
        decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        while True:
            self._take(decoder.decode(await self._socket.recv()))

    def _take(self, message: ToRank) -> None:
        match message:
            case RankCancel(number):
                if (running := self._running.get(number)) is not None:
                    running.cancel()
            case RankCall(number, command):
                self._running[number] = task = self._tasks.spawn(self._answer(number, command))
                task.add_done_callback(partial(self._answered, number))

    async def _answer(self, number: int, command: RankCommand) -> None:
        value: RankValue | None = None
        error = message = ""
        try:
            value = await self._carry_out(command)
        except PenstockError as failed:
            error, message = type(failed).__name__, str(failed)
        except asyncio.CancelledError:
            error, message = CANCELLED, "it was cancelled"
        except Exception as failed:
            # What the KV memory raises may be anything; without an answer the core would wait for ever.
            log.exception("a command failed", extra={"command": type(command).__name__})
            error, message = "EngineFailed", repr(failed)
        self._tasks.spawn(self._say(RankAnswer(self._rank, number, value, error, message)))

    def _answered(self, number: int, task: "asyncio.Task[None]") -> None:
        self._running.pop(number, None)
        if task.cancelled():  # before it began
            self._tasks.spawn(self._say(RankAnswer(self._rank, number, None, CANCELLED, "it was cancelled")))

    async def _carry_out(self, command: RankCommand) -> RankValue | None:
        assert self._agent is not None, "started before it is asked"
        match command:
            case RankExport(export_id, block_ids, kv_token):
                if export_id not in self._broken:
                    self._agent.export(export_id, block_ids, kv_token)
            case RankWithdraw(export_id):
                await self._agent.withdraw(export_id)
            case RankPull(peer, transfer_id, source, target, deadline_s):
                address = PeerAddress.parse(peer)
                return RankPulled(await self._agent.pull(address, transfer_id, source, target, deadline_s))
            case RankAskStatus():
                return RankStatus(await self._agent.status())
            case RankCapture(every_steps):
                return RankCapturing(self.capture(every_steps))
        return None

    async def _break(self, migration_ids: tuple[str, ...]) -> None:
        """Of a request that was preempted. The core may just be telling of more of its blocks, which are others by
        now."""
        assert self._agent is not None, "started before it is asked"
        for migration_id in migration_ids:
            self._broken[migration_id] = None
            await self._agent.withdraw(migration_id)
        while len(self._broken) > _MOST_BROKEN:
            del self._broken[next(iter(self._broken))]

    def _say_later(self, message: FromRank) -> None:
        self._loop.call_soon_threadsafe(lambda: self._tasks.spawn(self._say(message)))

    async def _say(self, message: FromRank) -> None:
        await self._socket.send(msgspec.msgpack.encode(message))
