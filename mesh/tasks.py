"""Background tasks that cannot get lost: kept, cancelled together, and loud when one dies."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class TaskSet:
    """The background tasks of one owner.

    asyncio keeps only weak references and reports a dead task when it is collected, if ever; a TaskGroup
    cancels all siblings when one fails, which is wrong for, say, one stream among many.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In the order in which they began, which is that in which they are cancelled."""

    def spawn(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        name: str,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[Any]:
        """Run `work` in the background. If it raises, that is logged and passed to `on_error`."""
        task = asyncio.create_task(work, name=f"{self._owner}:{name}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._ended(done, on_error))
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def ended(self) -> None:
        """Return once all have ended by themselves, those too that begin meanwhile."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def cancel(self) -> None:
        """Cancel all and wait until they are gone."""
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any], on_error: Callable[[BaseException], None] | None) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        log.error("a background task died", exc_info=error, extra={"task": task.get_name()})
        if on_error is not None:
            on_error(error)
