"""Whether the processes of a role grow (pure)."""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

import msgspec

MAX_GROWTH = 0.05
WARM_S = 30.0
"""Younger processes are still filling their caches."""
MIB = 1 << 20


class MemoryOfRole(msgspec.Struct, frozen=True):
    """Resident memory of the processes of one role, descendants included."""

    first_mib: float
    """Median of the first third of the time, over all processes of the role."""
    last_mib: float
    """Median of the last third of the time."""
    growth: float
    """From one to the other, as a fraction."""
    lives: int
    """Incarnations that were seen."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    age_s: float
    resident_bytes: int


@dataclass
class MemorySamples:
    """Taken every few seconds while a mesh is broken and mended.

    Processes that are restarted begin anew, so a role is compared, not a process: the median over its processes in the
    first third of the time against that in the last. Those younger than `WARM_S` are left out, unless a third has no
    others: whether a role has just been restarted would decide otherwise.
    """

    _samples: dict[str, list[_Sample]] = field(default_factory=lambda: defaultdict(list))
    _born_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, now_s: float, role: str, incarnation_id: str, resident_bytes: int) -> None:
        """Add the resident memory of one process, descendants included, at `now_s`."""
        born_s = self._born_s.setdefault((role, incarnation_id), now_s)
        self._samples[role].append(_Sample(now_s, now_s - born_s, resident_bytes))

    def by_role(self, begin_s: float, end_s: float) -> dict[str, MemoryOfRole]:
        """Of all roles that were seen in the first and in the last third of the time."""
        third_s = (end_s - begin_s) / 3
        found: dict[str, MemoryOfRole] = {}
        for role, samples in sorted(self._samples.items()):
            first = [each for each in samples if each.at_s <= begin_s + third_s]
            last = [each for each in samples if each.at_s >= end_s - third_s]
            if first and last:
                former, latter = _usual_bytes(first), _usual_bytes(last)
                lives = sum(born_role == role for born_role, _ in self._born_s)
                growth = round(latter / former - 1, 4)
                found[role] = MemoryOfRole(round(former / MIB, 1), round(latter / MIB, 1), growth, lives)
        return found


def grown(memory: dict[str, MemoryOfRole]) -> list[str]:
    """A sentence for each role that grows more than it may."""
    return [
        f"the memory of {role} grew by {each.growth:.1%}, from {each.first_mib} to {each.last_mib} MiB"
        for role, each in memory.items()
        if each.growth > MAX_GROWTH
    ]


def _usual_bytes(samples: list[_Sample]) -> float:
    warm = [sample for sample in samples if sample.age_s >= WARM_S]
    return median(sample.resident_bytes for sample in warm or samples)
