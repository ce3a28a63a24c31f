"""Adds up what the cascade routers of a mesh report of one cascade (pure): each sees its own part of the requests."""

from collections.abc import Collection
from dataclasses import dataclass

from controlplane.planning.cascade.observed import ObservedWindow

FORGOTTEN_AFTER_WINDOWS = 2.0
MAX_ROUTERS = 256
"""Of one cascade; more names are somebody's invention."""


@dataclass(slots=True)
class _Router:
    heard_s: float
    """When it last reported, or was first announced."""
    window: ObservedWindow | None = None
    """Of this round; None: not reported yet."""


class RouterWindows:
    """Makes one window of each round, in which every router reports once.

    A round ends when all routers that are announced have reported. One that reports again meanwhile replaces its
    window: the others are late, and are waited for until they have been silent for two windows, because a rate without
    theirs would look like a fall. Those that report later are counted again.
    """

    def __init__(self) -> None:
        self.waiting_for: tuple[str, ...] = ()
        """Routers that have not reported in this round."""
        self._routers: dict[str, _Router] = {}

    def reported(
        self, name: str, window: ObservedWindow, announced: Collection[str], now_s: float
    ) -> ObservedWindow | None:
        """A router has reported, while these are announced in the mesh; the round's window if it ends with that."""
        for expected in sorted(announced):
            if len(self._routers) < MAX_ROUTERS:
                self._routers.setdefault(expected, _Router(now_s))
        if name not in self._routers and len(self._routers) >= MAX_ROUTERS:
            return None
        self._routers[name] = _Router(now_s, window)
        silent_s = FORGOTTEN_AFTER_WINDOWS * (window.seconds or 0.0)
        late = [other for other, router in self._routers.items() if router.window is None]
        silent = {other for other in late if now_s - self._routers[other].heard_s >= silent_s}
        gone = {other for other in late if other not in announced and (announced or other in silent)}
        for other in gone:
            del self._routers[other]
        self.waiting_for = tuple(sorted(set(late) - silent - gone))
        if self.waiting_for:
            return None
        windows = [router.window for router in self._routers.values() if router.window is not None]
        for router in self._routers.values():
            router.window = None
        return sum_of(windows)


def sum_of(windows: Collection[ObservedWindow]) -> ObservedWindow:
    """One window of the same while, at the rates together. Each router's requests count as many as it sampled:
    frontends ask routers in turn, so that they see alike many."""
    lengths_s = [window.seconds for window in windows if window.seconds is not None]
    return ObservedWindow(
        rate_per_s=sum(window.rate_per_s for window in windows),
        seconds=max(lengths_s) if len(lengths_s) == len(windows) else None,
        requests=tuple(request for window in windows for request in window.requests),
    )
