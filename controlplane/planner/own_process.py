"""Calls functions in a process of its own: they take seconds of CPU, during which a role must still answer."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from typing import TypeVar

from mesh.errors import DeadlineExceeded, PeerUnavailable

R = TypeVar("R")


class OwnProcess:
    """One call at a time. Starts its process with the first one, and another after one that had to be ended."""

    def __init__(self, deadline_s: float, what: str, advice: str) -> None:
        """For messages: `what` is made here, and what to do where it takes too long."""
        self._deadline_s = deadline_s
        self._what = what
        self._advice = advice
        self._pool: ProcessPoolExecutor | None = None
        self._pid = 0
        """Of the process in the pool, once it has told."""

    async def call(self, function: Callable[..., R], *args: object) -> R:
        """What the function returns; raises what it raises, `DeadlineExceeded` where it takes too long, and
        `PeerUnavailable` if the process dies."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._called(function, *args)
        except TimeoutError:
            self.stop()
            raise DeadlineExceeded(
                f"no {self._what} was made within {self._deadline_s:g} s, and its process was ended: {self._advice}"
            ) from None
        except BrokenExecutor as error:
            self._pid = 0  # that is gone, and may be another's by now
            self.stop()
            raise PeerUnavailable(
                f"the process that makes each {self._what} has died, the next one gets another: {error}"
            ) from error

    def stop(self) -> None:
        """End the process; what is being made is lost."""
        pool, self._pool = self._pool, None
        pid, self._pid = self._pid, 0
        if pool is None:
            return
        pool.shutdown(wait=False, cancel_futures=True)
        if pid:
            # The pool itself would wait for what the process is at, and so would the end of this one.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _called(self, function: Callable[..., R], *args: object) -> R:
        loop = asyncio.get_running_loop()
        if self._pool is None:
            # spawn: a fork would copy the threads and sockets of gRPC.
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            self._pid = await loop.run_in_executor(self._pool, os.getpid)
        return await loop.run_in_executor(self._pool, function, *args)
