"""Tells a streaming client that its answer is still being worked on."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from services.frontend.answers.sender import AnswerSender
from services.frontend.answers.sse import comment

KEEP_ALIVE_S: Final = 5.0
"""A streaming client that has got nothing for so long gets a comment, which its reader skips."""


class KeepAlives:
    """Sent in the background, until they are stopped or the block is left: nothing else may be sent before."""

    def __init__(self, sender: AnswerSender, doing: Callable[[], str]) -> None:
        """`doing`: what is being done, in words."""
        self._sender = sender
        self._doing = doing
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._send(), name="keep-alives")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError) and self._task is not None:
            self._task.cancel()  # nobody is there whom half a comment could confuse
        await self.stop()

    async def stop(self) -> None:
        """Let one that is being sent be sent to its end, and send no more."""
        if self._task is None:
            return
        async with self._sending:
            self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.result()  # a bug, if it is not None
        self._task = None

    async def _send(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            async with self._sending:
                await self._sender.keep_alive(comment(self._doing()))
