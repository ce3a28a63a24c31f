"""Prefixes that leave and enter the simulated engine."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from controlplane.model.request import EngineRequest
from engine_worker.engines.simulated_host_tier import SimulatedHostTier
from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from mesh.errors import DeadlineExceeded
from mesh.tasks import TaskSet
from simulator.instance.instance import SimulatedInstance


class SimulatedPrefixes:
    """Implements `PrefixTransfers`."""

    def __init__(
        self,
        instance: SimulatedInstance,
        agent: Callable[[], KvTransferAgent],
        tasks: TaskSet,
        wake: Callable[[], None],
        host: Callable[[], SimulatedHostTier | None],
    ) -> None:
        """`agent` raises `ConfigurationError` where there is none. `wake`: blocks were freed, so the instance may have
        work. `host`: what is in the memory of the host, once the engine has started."""
        self._instance = instance
        self._agent = agent
        self._tasks = tasks
        self._wake = wake
        self._host = host
        self._held: set[str] = set()
        self._inside: dict[str, None] = {}
        """All ids that hold blocks in the instance, those of holds that are being let go included."""
        self._stepped = asyncio.Event()

    @property
    def transfers(self) -> tuple[str, ...]:
        """What is held and fetched now, for people."""
        return tuple(f"prefix {each}" for each in self._inside)

    def step_over(self) -> None:
        """A step may have computed what somebody waits for."""
        self._stepped.set()

    async def hold(
        self, hold_id: str, request: EngineRequest, most_blocks: int, wait_s: float, kv_token: str
    ) -> tuple[int, ...]:
        agent, own = self._agent(), replace(request, request_id=hold_id)
        if (host := self._host()) is not None:
            await host.bring(own, most_blocks)
        try:
            async with asyncio.timeout(wait_s if wait_s > 0 else None):
                while wait_s > 0 and self._instance.cached_blocks(own) < most_blocks:
                    self._stepped.clear()
                    await self._stepped.wait()
        except TimeoutError:
            pass  # what is there by now is held
        block_ids = self._instance.hold_prefix(own, most_blocks)
        self._held.add(hold_id)
        self._inside[hold_id] = None
        agent.export(hold_id, block_ids, kv_token)
        return block_ids

    def let_go(self, hold_id: str) -> None:
        if hold_id in self._held:
            self._held.discard(hold_id)
            self._tasks.spawn(self._let_go(hold_id), name=f"let go {hold_id}")

    async def fetch(
        self, pull_id: str, request: EngineRequest, peer: str, peer_block_ids: tuple[int, ...], deadline_s: float
    ) -> int:
        wanted = self._instance.admit_carrier(replace(request, request_id=pull_id), len(peer_block_ids))
        self._inside[pull_id] = None
        try:
            if wanted.block_ids:
                sent = peer_block_ids[wanted.first_block :]
                async with asyncio.timeout(deadline_s):
                    await self._agent().pull(PeerAddress.parse(peer), pull_id, sent, wanted.block_ids, deadline_s)
            self._instance.store_carried(pull_id)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the blocks of {pull_id} did not arrive within {deadline_s:g} s") from error
        finally:
            self._free(pull_id)
        return len(wanted.block_ids)

    def stop(self) -> None:
        """The engine stops: free everything."""
        for each in tuple(self._inside):
            self._free(each)
        self._held.clear()

    async def _let_go(self, hold_id: str) -> None:
        try:
            await self._agent().withdraw(hold_id)
        finally:
            self._free(hold_id)

    def _free(self, each: str) -> None:
        self._inside.pop(each, None)
        self._instance.abort(each)
        self._wake()
