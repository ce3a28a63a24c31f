"""Which instances placements may believe in, by what monitors, the directory and the frontends say of them. Pure.

A monitor that hears nothing of an instance may be cut off from it, or the instance may be dead or hung. Frontends know
better: their streams end with a dead worker, and they notice one that hangs while it has requests of theirs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FALLBACK: Final = "last_known_load"
"""What placing on an instance is called that a frontend is connected to and that no monitor hears of."""


class Heard(StrEnum):
    """What the monitor hears of an instance."""

    FRESH = "fresh"
    STALE = "stale"
    """Its report stream is there, and its load reports have stopped: it hangs, or the way to the monitor is cut."""
    NOT_AT_ALL = "not at all"
    """Its report stream has ended."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one instance."""

    instance_id: str
    model: str
    is_ready: bool
    """By its last report."""
    heard: Heard
    is_linked: bool
    """The directory knows it, and at least one frontend is connected to it."""


def disbelieved(standings: Iterable[Standing]) -> frozenset[str]:
    """Instances that nothing may be placed on, because nobody knows whether they live.

    One whose reports have merely stopped is believed in only where its model has no better one: idle workers that hang
    look like that, and a frontend learns of those by requests that it loses.
    """
    standings = tuple(standings)
    served = {each.model for each in standings if each.is_ready and _is_good(each)}
    return frozenset(
        each.instance_id
        for each in standings
        if not _is_good(each) and not (each.heard is Heard.STALE and each.is_linked and each.model not in served)
    )


def _is_good(standing: Standing) -> bool:
    return standing.heard is Heard.FRESH or (standing.heard is Heard.NOT_AT_ALL and standing.is_linked)
