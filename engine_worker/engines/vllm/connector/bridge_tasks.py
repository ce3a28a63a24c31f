"""What a bridge does on its loop, beside vLLM's."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

from mesh.errors import PenstockError

log = logging.getLogger(__name__)


class BridgeTasks:
    """The tasks of one bridge. Errors of Penstock are answers, which somebody takes in; all others are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin it on the loop that runs here, which is the bridge's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """Cancel all and wait until they are gone. In rounds: a command that is cancelled still answers, by a task of
        its own."""
        while tasks := [task for task in self._tasks if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PenstockError):
            log.error("a task of the KV bridge failed", exc_info=error)
