"""The console at many moments of a run that is over, bounded in moments and bytes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from services.frontend.console.requests import Story
from services.frontend.console.state import State
from services.frontend.console.update import Update, Viewer, change, whole

LIVE_INTERVAL_MS: Final = 1000.0
LEAST_INTERVAL_MS: Final = 100.0
MAX_MOMENTS: Final = 400
MAX_INSTANCE_ROWS: Final = 100_000
"""Of all moments together: a thousand instances are shown at a hundred moments."""
MIN_MOMENTS: Final = 20
"""Fewer are kept only where there are so many instances."""
MAX_RECORDING_BYTES: Final = 48 << 20
"""Of JSON, all runs together; compressed it is about a tenth."""
ANYBODY: Final = Viewer()


def first_interval_ms(arrivals_s: float) -> float:
    """Between two moments of a run in which requests arrive for so long: as live, but shorter in a short run."""
    return min(LIVE_INTERVAL_MS, max(LEAST_INTERVAL_MS, round(2000 * arrivals_s / MAX_MOMENTS)))


class RecordedRun(msgspec.Struct, frozen=True):
    """One run, as the page reads it."""

    name: str
    """Of the policy."""
    interval_s: float
    """Between two moments."""
    facts: Mapping[str, str]
    """Of the whole run, by name."""
    updates: Sequence[Update]
    """The first one whole, each other what is new since the one before."""
    stories: Mapping[str, Story]
    """Of the requests that took longest, by id."""
    requests: int
    """That ended, whether or not their stories are kept."""


@dataclass(slots=True)
class Moments:
    """States at even distances. Where there would be too many, every second one is dropped and the distance doubled."""

    interval_ms: float = LIVE_INTERVAL_MS
    max_moments: int = MAX_MOMENTS
    states: list[State] = field(default_factory=list)
    _due_ms: float = 0.0

    def __post_init__(self) -> None:
        assert self.interval_ms > 0, "time goes on"
        assert self.max_moments >= 2, "half of one moment is none"

    def is_due(self, now_ms: float) -> bool:
        """Whether a state of this moment is wanted."""
        return now_ms >= self._due_ms

    def add(self, state: State, now_ms: float) -> None:
        """Keep the state of a moment; moments come in the order of their times."""
        if len(self.states) >= self.max_moments or self._rows() + len(state.instances) > MAX_INSTANCE_ROWS:
            self.thin()
        self.states.append(state)
        self._due_ms = now_ms + self.interval_ms

    def thin(self) -> None:
        """Drop every second one."""
        del self.states[1::2]
        self.interval_ms *= 2

    def _rows(self) -> int:
        return len(self.states) * (len(self.states[-1].instances) if self.states else 0)

    def updates(self) -> list[Update]:
        """What a viewer of the live console would have been sent."""
        first = [whole(1, state, ANYBODY) for state in self.states[:1]]
        pairs = zip(self.states, self.states[1:], strict=False)
        return first + [change(number, before, now, ANYBODY) for number, (before, now) in enumerate(pairs, 2)]


def encode_run(
    name: str,
    moments: Moments,
    facts: Mapping[str, str],
    stories: Mapping[str, Story],
    requests: int,
    max_bytes: int = MAX_RECORDING_BYTES,
) -> bytes:
    """A `RecordedRun` as JSON of at most about so many bytes: with fewer moments and stories where it must be."""
    while True:
        run = RecordedRun(name, moments.interval_ms / 1000, facts, moments.updates(), stories, requests)
        encoded = msgspec.json.encode(run)
        if len(encoded) <= max_bytes or (len(moments.states) <= MIN_MOMENTS and not stories):
            return encoded
        if len(moments.states) > MIN_MOMENTS:
            moments.thin()
        stories = dict(list(stories.items())[: len(stories) // 2])


def from_zero(run: bytes, name: str | None = None) -> bytes:
    """An encoded run whose times begin at 0, so that it can stand beside another one; under another name if one is
    given."""
    document = msgspec.json.decode(run)
    begun_unix_ms = document["updates"][0]["body"]["at_unix_ms"]
    at = document["updates"][0]["point_columns"].index("at_unix_ms")
    for update in document["updates"]:
        for point in update["series"]:
            point[at] -= begun_unix_ms
    moved: dict[str, Any] = _earlier(document, begun_unix_ms)
    return msgspec.json.encode(moved if name is None else {**moved, "name": name})


def _earlier(value: Any, by_ms: int) -> Any:
    if isinstance(value, list):
        return [_earlier(each, by_ms) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: each - by_ms if name.endswith("_unix_ms") and isinstance(each, int) else _earlier(each, by_ms)
        for name, each in value.items()
    }


def recording(title: str, runs: Sequence[bytes], *, is_simulated: bool) -> bytes:
    """What the page opens: encoded runs that are shown side by side. Times of a simulated one begin at 0."""
    document = {"title": title, "is_simulated": is_simulated, "runs": [msgspec.Raw(run) for run in runs]}
    return msgspec.json.encode(document)
