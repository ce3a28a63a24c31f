"""Time as the store sees it, so that tests can turn the hands."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock with its own sleep."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes backwards."""

    async def sleep(self, duration_s: float) -> None:
        """Return once `duration_s` have passed on this clock."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes backwards."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        """Return once `duration_s` have passed."""
        await asyncio.sleep(duration_s)
