"""What the monitor can be told."""

from dataclasses import dataclass

from mesh.errors import ConfigurationError

_LONGER_THAN_NOTHING = ("stale_s", "heartbeat_ms", "max_backlog", "max_reports_per_s")


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """Times and bounds of the instance monitor."""

    stale_s: float = 2.0
    """Seconds without a load report after which an instance counts as stale and is not placed on."""
    settle_s: float = 3.0
    """Seconds after start in which known workers may still come back before watchers are told that they have all."""
    flush_ms: float = 10.0
    """Milliseconds over which changes are gathered into one message to a watcher."""
    heartbeat_ms: float = 500.0
    """Milliseconds of quiet after which a watcher is sent an empty update."""
    max_reports_per_s: float = 4000.0
    """Load reports a second, of all instances together: beyond this each is asked to report less often, at most to a
    quarter of `stale_s`."""
    max_backlog: int = 2_000_000
    """Changes and block hashes, 8 bytes each, that may wait for one watcher; a slower watcher is cut off and starts
    again. A thousand busy instances bring a million a second."""

    def __post_init__(self) -> None:
        """Raises `ConfigurationError` for settings by which no instance would be believed or no watcher ever rest."""
        for name in _LONGER_THAN_NOTHING:
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name):g}")
