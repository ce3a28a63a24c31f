"""The highest rate that a system sustains: bisection over a trace's rate scale."""

from collections.abc import Callable
from dataclasses import dataclass

from mesh.errors import ConfigurationError

TARGET_ATTAINMENT = 0.9
"""Share of the requests that must meet their SLO."""


@dataclass(frozen=True, slots=True)
class RateSearch:
    """How a sustainable rate is looked for; scales multiply the trace's own rate."""

    start_scale: float = 1.0
    lowest_scale: float = 1 / 64
    highest_scale: float = 256.0
    growth: float = 2.0
    """From one scale to the next while a bracket is looked for; less where the start is known to be close."""
    tolerance: float = 0.02
    """Relative width of the last bracket."""
    target: float = TARGET_ATTAINMENT

    def __post_init__(self) -> None:
        if not 0 < self.lowest_scale <= self.start_scale <= self.highest_scale:
            raise ConfigurationError(f"a rate search needs 0 < lowest <= start <= highest, got {self}")
        if not (self.tolerance > 0 and self.growth > 1 and 0 < self.target <= 1):
            raise ConfigurationError(
                f"a rate search needs tolerance > 0, growth > 1 and a target in (0, 1]; got {self}"
            )


@dataclass(frozen=True, slots=True)
class SustainableRate:
    """The highest rate found that meets the target, and everything that was tried."""

    scale: float | None
    """The highest scale tried that met the target, with a miss at most `tolerance` above it; None: even the lowest
    scale missed."""
    is_bound: bool
    """The highest scale allowed still met the target: the true figure is above."""
    probes: tuple[tuple[float, float], ...]
    """Scale and attainment of everything that was tried, in ascending order of scale."""


def sustainable_rate(attainment_at: Callable[[float], float], search: RateSearch) -> SustainableRate:
    """Go up or down from the start until the target is met on one side and missed on the other, then bisect.

    Attainment is taken to fall with the rate. Where it wavers around the target, the answer is one of the crossings:
    equal arguments give the same one. Every other probe is where the straight line between the two sides crosses the
    target, which saves half of the probes where attainment falls gently; the ones between halve the bracket.
    """
    probes: dict[float, float] = {}

    def meets(scale: float) -> bool:
        probes[scale] = attainment_at(scale)
        return probes[scale] >= search.target

    met, missed = _bracket(meets, search)
    if met is not None and missed is not None:
        is_line_next = True
        while missed / met > 1 + search.tolerance:
            between = _crossing(met, missed, probes, search) if is_line_next else (met * missed) ** 0.5
            is_line_next = not is_line_next
            if meets(between):
                met = between
            else:
                missed = between
    return SustainableRate(met, missed is None, tuple(sorted(probes.items())))


def _crossing(met: float, missed: float, probes: dict[float, float], search: RateSearch) -> float:
    """Where a line through both probes, over the logarithm of the scale, crosses the target; no closer to either than
    the tolerance, so that a probe next to the crossing can end the search."""
    share = (probes[met] - search.target) / (probes[met] - probes[missed])
    crossing: float = met * (missed / met) ** share
    nearest = (1 + search.tolerance) * (1 - 1e-9)
    if missed / met <= nearest**2:
        return float((met * missed) ** 0.5)
    return min(max(crossing, met * nearest), missed / nearest)


def _bracket(meets: Callable[[float], bool], search: RateSearch) -> tuple[float | None, float | None]:
    """A scale that meets the target and a higher one that misses it; None where the search's limits have none."""
    scale = search.start_scale
    if meets(scale):
        while scale < search.highest_scale:
            met, scale = scale, min(scale * search.growth, search.highest_scale)
            if not meets(scale):
                return met, scale
        return scale, None
    while scale > search.lowest_scale:
        missed, scale = scale, max(scale / search.growth, search.lowest_scale)
        if meets(scale):
            return scale, missed
    return None, scale
