"""What a cascade router tells of the workload."""

from dataclasses import dataclass

from controlplane.planner.cascade.stored import StoredCascade
from controlplane.planning.cascade.observed import ObservedWindow
from controlplane.planning.cascade.workload import WorkloadWindow


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """What a cascade router tells of one window."""

    cascade: str
    lines: tuple[bytes, ...]
    """`controlplane.planning.cascade.workload.read_window`."""
    judge: str = ""
    """Whose scores these are; empty: the first judge's."""
    router: str = ""
    """Its name in the mesh; empty: it is the only one."""
    window_s: float = 0.0
    """0: not known, then the rate stands in the lines only."""
    offered: int = 0
    """All requests of the window."""

    def observed(self, window: WorkloadWindow) -> ObservedWindow:
        """Of the lines that were read."""
        if self.window_s <= 0:
            return ObservedWindow(window.rate_per_s, None, window.requests)
        return ObservedWindow(self.offered / self.window_s, self.window_s, window.requests)

    def refusal(self, window: WorkloadWindow, stored: StoredCascade) -> str:
        """Why it says nothing of the cascade as it stands; empty if it does."""
        record = stored.record
        if record is None:
            return f"there is no cascade {self.cascade}, so nothing is planned: penstock cascade set"
        if not record.judges:
            return f"{self.cascade} has no judge, so nothing is planned"
        if record.tiers != window.models:
            return f"left out: it is of {', '.join(window.models)}, the cascade has {', '.join(record.tiers)} now"
        if self.judge and self.judge != record.judges[0]:
            return f"left out: these are scores of {self.judge}, the cascade is judged by {record.judges[0]} now"
        return ""
