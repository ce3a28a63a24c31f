"""Whether the other side of a connection still lives, while transfers are under way.

UCX tells of a killed peer as soon as the kernel closes its socket. It does not tell of a peer that hangs, nor of a
cut cable (for minutes), nor of a dead one whose sockets a child process has inherited.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Scheduled(Protocol):
    """A scheduled call, as `loop.call_later` returns it."""

    def cancel(self) -> None:
        """Drop the call, if it has not been made yet."""


Schedule = Callable[[float, Callable[[], None]], Scheduled]
"""Calls after so many seconds, once."""


class Heartbeat:
    """Says that this side lives, and counts the beats for which nothing was heard.

    Beats are counted, not seconds: a process that stood still itself, or was starved, misses its own beats and does
    not blame the peer for them.
    """

    def __init__(
        self,
        beat_s: float,
        silent_beats: int,
        *,
        say: Callable[[], None],
        lost: Callable[[str], None],
        schedule: Schedule | None = None,
    ) -> None:
        """`say` tells the peer; `lost` is called once, after `silent_beats` in a row in which `heard` was not."""
        self._beat_s = beat_s
        self._silent_beats = silent_beats
        self._say = say
        self._lost = lost
        self._schedule: Schedule = schedule or (lambda s, call: asyncio.get_running_loop().call_later(s, call))
        self._silent = 0
        self._next: Scheduled | None = None

    def start(self) -> None:
        """A transfer began. No effect while it beats already."""
        if self._next is None:
            self._silent = 0
            self._next = self._schedule(self._beat_s, self._beat)

    def stop(self) -> None:
        """No transfer is under way any more, or the connection ended."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def heard(self) -> None:
        """The peer sent something, so it lives."""
        self._silent = 0

    def _beat(self) -> None:
        self._next = None
        if self._silent >= self._silent_beats:
            self._lost(
                f"nothing was heard from it for {self._silent} beats of {self._beat_s:g} s; it hangs or is cut off"
            )
            return
        self._silent += 1
        self._next = self._schedule(self._beat_s, self._beat)
        self._say()
