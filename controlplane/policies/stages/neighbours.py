"""What an instance knows of its neighbours: their last reports."""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.policies.stages.refinement import RequestLength, even_share

MAX_LENGTHS = 1024
"""In one report; the usual limit of a batch. Longer lists are thinned evenly."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """An instance to its neighbours, now and then (CascadeInfer, section 3.2)."""

    load_tokens: int
    """Context of all requests there."""
    boundary_tokens: float | None
    """Where its range ends; None in the last stage."""
    lengths: tuple[RequestLength, ...]
    """Of the requests that decode there."""

    @staticmethod
    def of(load_tokens: int, boundary_tokens: float | None, lengths: Sequence[RequestLength]) -> "StageReport":
        """Thins what is too long."""
        parts = -(-len(lengths) // MAX_LENGTHS)
        kept = lengths if parts <= 1 else even_share(lengths, parts)
        return StageReport(load_tokens, boundary_tokens, tuple(kept))


class Neighbours:
    """The last report of each, with its age."""

    def __init__(self, stale_ms: float) -> None:
        self._stale_ms = stale_ms
        self._reports: dict[str, tuple[float, StageReport]] = {}

    def heard(self, instance_id: str, report: StageReport, now_ms: float) -> None:
        """The newest one replaces the one before."""
        self._reports[instance_id] = (now_ms, report)

    def forget(self, instance_id: str) -> None:
        """Drop the last report of an instance that is gone."""
        self._reports.pop(instance_id, None)

    def fresh(self, instance_id: str, now_ms: float) -> StageReport | None:
        """None where there is no report or it is too old to be believed."""
        heard_ms, report = self._reports.get(instance_id, (float("-inf"), None))
        return report if now_ms - heard_ms < self._stale_ms else None
