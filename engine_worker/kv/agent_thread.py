"""An agent on a thread and event loop of its own, for an engine that has neither to spare."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats
from mesh.errors import DeadlineExceeded, KvTransferFailed

_Result = TypeVar("_Result")

_CALL_S = 30.0
"""For what the agent answers at once unless its thread is dead."""


class AgentThread:
    """All methods may be called from any thread but its own, once `start` has returned."""

    def __init__(self, agent: KvTransferAgent) -> None:
        self._agent = agent
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-transfer", daemon=True)

    def start(self) -> int:
        """See `KvTransferAgent.start`."""
        self._thread.start()
        return self._wait(self._agent.start())

    def export(self, export_id: str, block_ids: Sequence[int]) -> None:
        """See `KvTransferAgent.export`; in force on return."""
        self._call(lambda: self._agent.export(export_id, block_ids))

    def withdraw(self, export_id: str) -> "concurrent.futures.Future[None]":
        """See `KvTransferAgent.withdraw`; free the blocks once it is done."""
        return self._begin(self._agent.withdraw(export_id))

    def reserve(self, transfer_id: str, block_ids: Sequence[int]) -> None:
        """See `PullOrders.reserve`; in force on return."""
        self._call(lambda: self._agent.orders.reserve(transfer_id, block_ids))

    def release(self, transfer_id: str) -> "concurrent.futures.Future[None]":
        """See `PullOrders.release`; free the blocks once it is done."""
        return self._begin(self._agent.orders.release(transfer_id))

    def pull(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> "PullHandle":
        """See `KvTransferAgent.pull`."""
        return PullHandle(
            self._loop, self._agent.pull(peer, transfer_id, source_block_ids, target_block_ids, deadline_s)
        )

    async def pull_reserved(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """See `PullOrders.pull`; awaited on another event loop."""
        pulling = self._agent.pull_reserved(peer, transfer_id, source_block_ids, target_block_ids, deadline_s)
        return await asyncio.wrap_future(self._begin(pulling))

    async def describe(self) -> AgentDescription:
        """See `KvTransferAgent.describe`."""
        return await asyncio.wrap_future(self._begin(self._agent.describe()))

    async def status(self) -> AgentStatus:
        """See `KvTransferAgent.status`."""
        return await asyncio.wrap_future(self._begin(self._agent.status()))

    def stop(self) -> None:
        """Fail all transfers and end the thread."""
        self._wait(self._agent.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        async def run() -> None:
            function()

        self._wait(run())

    def _begin(self, work: Coroutine[Any, Any, _Result]) -> "concurrent.futures.Future[_Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future = self._begin(work)
        try:
            return future.result(_CALL_S)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise DeadlineExceeded(f"the KV agent's thread did not answer within {_CALL_S:g} s") from error


class PullHandle:
    """A pull that runs on the agent's thread.

    A plain concurrent future is done as soon as it is cancelled, while its transfer still comes to rest; `result`
    is done only after that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, TransferStats]) -> None:
        self.result: concurrent.futures.Future[TransferStats] = concurrent.futures.Future()
        """No target block is touched any more once it is done. Do not cancel it: call `cancel`."""
        self._loop = loop
        self._task: asyncio.Task[TransferStats] | None = None
        loop.call_soon_threadsafe(self._begin, work)

    def cancel(self) -> None:
        """Ends it soon, with `KvTransferFailed`, unless it has ended. (A future's own CancelledError would look to
        who awaits it as if he were cancelled himself.)"""
        self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self, work: Coroutine[Any, Any, TransferStats]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        assert self._task is not None, "a handle begins before it is cancelled"
        self._task.cancel()

    def _ended(self, task: asyncio.Task[TransferStats]) -> None:
        if task.cancelled():
            self.result.set_exception(KvTransferFailed("the pull was cancelled"))
        elif (error := task.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())
