"""How many prefixes the workers of a mesh pull while it is broken."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from mesh.errors import PenstockError
from mesh.membership import Member
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.cli.connection import call

LOOK_EVERY_S: Final = 0.25


class PullCounts:
    """Since the first look. A worker that is killed takes along what it pulled since the last."""

    def __init__(self, workers: Callable[[], Sequence[Member]]) -> None:
        self._workers = workers
        self._first: dict[str, tuple[int, int]] | None = None
        self._last: dict[str, tuple[int, int]] = {}
        """Prefixes pulled, and computed although they were to be pulled, by incarnation."""

    @property
    def pulled(self) -> int:
        """Prefixes that came from another instance."""
        return self._grown(0)

    @property
    def computed(self) -> int:
        """Prefixes that were to come, and were computed."""
        return self._grown(1)

    async def look(self) -> None:
        """Ask all workers. Who does not answer counts as it did."""
        await asyncio.gather(*map(self._ask, self._workers()))
        if self._first is None:
            self._first = dict(self._last)

    async def keep_looking(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def _ask(self, worker: Member) -> None:
        with suppress(PenstockError):
            answer = await call(worker, worker_pb2_grpc.WorkerStub, "GetLoad", worker_pb2.GetLoadRequest())
            pulls = answer.load.pulls
            self.heard(worker.incarnation_id, pulls.pulled_total, pulls.computed_total)

    def heard(self, incarnation_id: str, pulled: int, computed: int) -> None:
        """A worker has said what it has pulled so far."""
        self._last[incarnation_id] = (pulled, computed)

    def _grown(self, which: int) -> int:
        first = self._first or {}
        return sum(counts[which] - first.get(each, (0, 0))[which] for each, counts in self._last.items())
