"""A clock that a test moves."""

import asyncio


class StillClock:
    """A `mesh.runtime.Clock` whose two hands stand until a test sets them."""

    def __init__(self, at_s: float = 100.0, unix_at_s: float | None = None) -> None:
        self.at_s = at_s
        self.unix_at_s = unix_at_s
        """None: as the monotonic hand."""

    def now_s(self) -> float:
        return self.at_s

    def unix_s(self) -> float:
        return self.at_s if self.unix_at_s is None else self.unix_at_s

    async def sleep(self, duration_s: float) -> None:
        """By the event loop; whoever moves the hands wakes nobody."""
        await asyncio.sleep(duration_s)
