"""What is simulated."""

from dataclasses import dataclass, field

from mesh.errors import ConfigurationError
from simulator.instance.config import InstanceConfig


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance dies, and with it its cache; its requests are placed anew and go on after their last token."""

    instance: int
    """Counted from 0."""
    at_s: float
    back_after_s: float | None = None
    """When a fresh incarnation joins, empty; None: never."""

    def __post_init__(self) -> None:
        if self.at_s < 0 or (self.back_after_s is not None and self.back_after_s <= 0):
            raise ConfigurationError(f"a failure needs at_s >= 0 and back_after_s > 0, got {self}")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Equal instances of one model, and how old what the scheduler knows of them is."""

    instances: int
    instance: InstanceConfig
    model: str = "simulated"
    report_interval_ms: float = 50.0
    """Each instance reports load and cache changes this often, at a phase of its own; 0: just in time for each
    placement."""
    report_delay_ms: float = 1.0
    """From an instance to the scheduler."""
    failures: tuple[Failure, ...] = ()
    seed: int = 0
    """Phases of the reports follow from it."""
    skip_steps: bool = field(default=True, kw_only=True)
    """Take runs of steps at once; off, every step is planned by itself, for the same results."""

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigurationError(f"a cluster has at least one instance, got {self.instances}")
        if self.report_interval_ms < 0 or self.report_delay_ms < 0:
            raise ConfigurationError("report_interval_ms and report_delay_ms must not be negative")
        down_until: dict[int, float] = {}
        for failure in sorted(self.failures, key=lambda failure: failure.at_s):
            if not 0 <= failure.instance < self.instances:
                raise ConfigurationError(f"{failure}: instances are numbered 0 to {self.instances - 1}")
            if failure.at_s <= down_until.get(failure.instance, -1.0):
                raise ConfigurationError(f"{failure}: this instance is down at that time already")
            back_s = float("inf") if failure.back_after_s is None else failure.at_s + failure.back_after_s
            down_until[failure.instance] = back_s
