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


class ReportState(StrEnum):
    """Whether the monitor gets load reports from an instance."""

    FRESH = "fresh"
    STALE = "stale"
    """Its report stream is there, and its load reports have stopped: it hangs, or the way to the monitor is cut."""
    MISSING = "missing"
    """Its report stream has ended."""


@dataclass(frozen=True, slots=True)
class InstanceEvidence:
    """What monitors, the directory and frontends know of one instance."""

    instance_id: str
    model: str
    is_ready: bool
    """Whether its last report said that it is ready."""
    reports: ReportState
    is_linked: bool
    """The directory knows it, and at least one frontend is connected to it."""


def untrusted_instances(evidence: Iterable[InstanceEvidence]) -> frozenset[str]:
    """Instances that nothing may be placed on, because nobody knows whether they live.

    One whose reports have merely stopped is believed in only where its model has no better one: idle workers that hang
    look like that, and a frontend learns of those by requests that it loses.
    """
    evidence = tuple(evidence)
    served = {each.model for each in evidence if each.is_ready and _is_good(each)}
    return frozenset(
        each.instance_id
        for each in evidence
        if not _is_good(each)
        and not (each.reports is ReportState.STALE and each.is_linked and each.model not in served)
    )


def _is_good(each: InstanceEvidence) -> bool:
    return each.reports is ReportState.FRESH or (each.reports is ReportState.MISSING and each.is_linked)
