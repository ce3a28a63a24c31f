"""Pulls that are ordered from outside the engine, into blocks that the engine has set aside for them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.grants import BlockGrants
from engine_worker.kv.session import at_rest
from engine_worker.kv.transfer import TransferStats
from mesh.errors import KvTransferFailed

PullBlocks = Callable[[PeerAddress, str, Sequence[int], Sequence[int], float], Awaitable[TransferStats]]


class PullOrders:
    """An order may write only where the engine has reserved blocks under the order's transfer id."""

    def __init__(self, pull: PullBlocks) -> None:
        self._pull = pull
        self._reserved = BlockGrants("reserved")
        self._running: dict[str, dict[asyncio.Task[TransferStats], None]] = {}

    def reserve(self, transfer_id: str, block_ids: Sequence[int]) -> None:
        """Allow orders of this id to write to these blocks, besides those reserved before."""
        self._reserved.open(transfer_id, block_ids)

    async def release(self, transfer_id: str) -> None:
        """End a reservation and its orders. When this returns they no longer write to the blocks."""
        self._reserved.close(transfer_id)
        running = tuple(self._running.get(transfer_id, ()))
        for task in running:
            task.cancel()
        for task in running:
            await at_rest(task)

    async def pull(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """`KvTransferAgent.pull`; raises `KvTransferRefused` besides unless the target blocks are reserved, and
        `KvTransferFailed` if they are released meanwhile."""
        self._reserved.check(transfer_id, target_block_ids)
        task = asyncio.ensure_future(self._pull(peer, transfer_id, source_block_ids, target_block_ids, deadline_s))
        running = self._running.setdefault(transfer_id, {})
        running[task] = None
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise KvTransferFailed(f"the blocks reserved for {transfer_id!r} were released") from None
            task.cancel()
            await at_rest(task)
            raise
        finally:
            running.pop(task, None)
            if not running:
                self._running.pop(transfer_id, None)
