"""Bounds of the prefix pulls of one instance, to it and from it."""

from dataclasses import dataclass

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PullLimits:
    """How many and how long; all times in milliseconds."""

    parallel: int = 3
    """Pulls to here under way at once: as many as the KV transfer agent carries out at a time."""
    queued: int = 64
    """That wait for their turn, within their deadlines; a request beyond them is computed."""
    holding: int = 8
    """Prefixes held for others at once; one more is refused."""
    least_ms: float = 100.0
    """A pull is given at least so long, however quickly the prefix could be computed: a busy process answers late."""
    most_ms: float = 10_000.0
    """And at most so long."""
    wait_share: float = 0.5
    """Of its time a pull spends at most so much on waiting for blocks that its source is still computing; with what it
    was given for that besides."""
    hold_ms: float = 15_000.0
    """A source lets go after this, whatever the other side says."""

    def __post_init__(self) -> None:
        if min(self.parallel, self.holding) < 1 or self.queued < 0:
            raise ConfigurationError(f"parallel and holding must be 1 or more, queued 0 or more, got {self}")
        if not 0 < self.least_ms <= self.most_ms <= self.hold_ms or not 0 <= self.wait_share <= 1:
            raise ConfigurationError(f"0 < least_ms <= most_ms <= hold_ms and wait_share within 0 to 1, got {self}")

    def allowed_ms(self, compute_ms: float, comes_ms: float = 0.0) -> float:
        """How long a pull may take if computing what it brings takes `compute_ms`, and its source has yet to compute it
        and is thought to be through in `comes_ms`. That is a guess: it may take twice as long."""
        return min(self.most_ms, max(self.least_ms, compute_ms) + 2 * comes_ms)

    def wait_ms(self, left_ms: float, compute_ms: float) -> float:
        """How long the source of a pull with so much time left may wait for blocks that it is computing."""
        return max(self.wait_share * left_ms, left_ms - (1 - self.wait_share) * self.allowed_ms(compute_ms))
