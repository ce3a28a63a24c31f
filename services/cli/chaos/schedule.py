"""Which fault comes next in a soak, and when (pure)."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.cli.chaos.verdict import Fault

PAUSE_S = (1.0, 6.0)
"""Between a mesh that is whole again and its next fault."""
HANG_S = (1.0, 8.0)


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault of a soak: when it comes and how long it lasts."""

    pause_s: float
    """Before it."""
    fault: Fault
    hold_s: float
    """How long who hangs is left hanging."""


def survivable_faults(members: Mapping[str, int]) -> list[Fault]:
    """Faults that a mesh with so many members of each role has to bear without failing a request. `drain` is not among
    them, because who is drained stays away; `restart` drains as well."""
    faults: list[Fault] = ["rolling", "delete-members", "cut-monitor", "kill-scheduler", "kill-monitor", "wipe-store"]
    if members.get("worker", 0) > 1:
        faults += ["kill", "hang", "restart"]
    if members.get("frontend", 0) > 1:
        faults.append("kill-frontend")
    return faults


def scheduled_faults(seed: int, faults: Sequence[Fault]) -> Iterator[ScheduledFault]:
    """For ever: every fault once in a random order, then all again in another. One seed always gives the same ones."""
    draw = random.Random(seed)
    while True:
        for fault in draw.sample(faults, len(faults)):
            yield ScheduledFault(draw.uniform(*PAUSE_S), fault, draw.uniform(*HANG_S))
