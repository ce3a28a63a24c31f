"""LMetric's two-phase detector of KV hotspots."""

from dataclasses import dataclass, field

import msgspec

from mesh.invariants import invariants

SLICES = 12
"""Of a window in which requests are counted."""


class SlidingCount:
    """How many events, or how much of something, fell into the last window of time, in constant memory.

    It counts by slices of a twelfth of the window: an event is forgotten up to a slice before the window is over.

    Time that goes backwards counts as the latest time seen.
    """

    __slots__ = ("_counts", "_latest", "_slice_s", "_total")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / SLICES
        self._counts = [0] * SLICES
        self._latest = 0
        self._total = 0

    def add(self, now_s: float, amount: int = 1) -> None:
        self._forget_before(now_s)
        self._counts[self._latest % SLICES] += amount
        self._total += amount

    def total(self, now_s: float) -> int:
        """All that was added in the window that ends at `now_s`."""
        self._forget_before(now_s)
        return self._total

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert all(count >= 0 for count in self._counts), "slices count events"
        assert self._total == sum(self._counts), "the total is that of the slices"

    def _forget_before(self, now_s: float) -> None:
        slice_number = int(now_s // self._slice_s)
        passed = slice_number - self._latest
        if passed <= 0:
            return
        for number in range(self._latest + 1, self._latest + 1 + min(passed, SLICES)):
            self._total -= self._counts[number % SLICES]
            self._counts[number % SLICES] = 0
        self._latest = slice_number


class ClassSighting(msgspec.Struct, frozen=True):
    """A request of a class, and the instances as it found them."""

    class_hash: int
    holders: int
    """|M|: instances that have the class's prefix cached; at least 1."""
    others: int
    """|M-bar|: the candidates that do not."""
    lower_on_holders: bool
    """Equation 4: the best score is a holder's."""
    hit_tokens: int = 1
    """Of its prompt that the holders have cached."""


@dataclass(slots=True)
class RequestClass:
    """Requests that share a cached prefix."""

    requests: SlidingCount
    hit_tokens: SlidingCount
    """Of these requests' prompts that somebody had cached."""
    lower_in_a_row: int = 0
    """Requests since the first alarm, in a row, that scored lower on holders than elsewhere."""
    benign_since_s: float | None = None
    """Since when equation 2 has held, while instances are filtered out."""
    filtered_ids: frozenset[str] = field(default_factory=frozenset)
    """Instances that the class's requests stay away from."""


class HotspotDetector:
    """Watches one model's requests for classes that would overload the few instances that cache their prefix
    (LMetric, section 5.2).

    First phase: a class with a share x of the window's requests alarms if x / (1 - x) > |M| / |M-bar|, so equation 2
    does not hold. Second phase: if then more than 2|M| of its requests in a row score lower on M than elsewhere,
    M as it then is gets filtered out for the class, until equation 2 has held again for `hold_s`. The paper does not
    say when the filter ends.

    Memory: only the classes with the highest hit rates are tracked, as in the paper. Classes beyond twice `max_classes`
    are forgotten but for the `max_classes` with the most cached tokens in the window. By requests, which came first
    here, short system prompts that everybody shares push out the long documents that make hotspots.
    """

    def __init__(self, window_s: float, max_classes: int, hold_s: float) -> None:
        self._window_s = window_s
        self._hold_s = hold_s
        self._max_classes = max_classes
        self._requests = SlidingCount(window_s)
        self._classes: dict[int, RequestClass] = {}

    def __len__(self) -> int:
        return len(self._classes)

    def missed(self, now_s: float) -> None:
        """A request whose prefix nobody has cached: of no class, but part of the traffic."""
        self._requests.add(now_s)

    def seen(self, now_s: float, sighting: ClassSighting) -> tuple[RequestClass, bool]:
        """Count a request of a class. Returns the class, and whether this raises its second alarm: the caller then
        names the holders to `filter_out`."""
        self._requests.add(now_s)
        seen = self._class(now_s, sighting.class_hash)
        seen.requests.add(now_s)
        seen.hit_tokens.add(now_s, sighting.hit_tokens)
        if not self._alarms(now_s, seen, sighting):
            seen.lower_in_a_row = 0
            self._clear_when_over(now_s, seen)
            return seen, False
        seen.benign_since_s = None
        seen.lower_in_a_row = seen.lower_in_a_row + 1 if sighting.lower_on_holders else 0
        return seen, seen.lower_in_a_row > 2 * sighting.holders

    def filter_out(self, hot: RequestClass, holder_ids: frozenset[str]) -> None:
        """Keep the class's requests away from these instances from now on."""
        hot.filtered_ids = holder_ids
        hot.lower_in_a_row = 0

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(self._classes) <= 2 * self._max_classes, "classes are bounded"
        self._requests.validate()
        for known in self._classes.values():
            known.requests.validate()
            known.hit_tokens.validate()
            assert known.lower_in_a_row >= 0, "what is counted in a row"
            assert known.filtered_ids or known.benign_since_s is None, "only a filter awaits its end"

    def _alarms(self, now_s: float, seen: RequestClass, sighting: ClassSighting) -> bool:
        """x / (1 - x) > |M| / |M-bar|, multiplied out."""
        of_class = seen.requests.total(now_s)
        of_others = self._requests.total(now_s) - of_class
        return of_class * sighting.others > of_others * sighting.holders

    def _clear_when_over(self, now_s: float, seen: RequestClass) -> None:
        if not seen.filtered_ids:
            return
        if seen.benign_since_s is None:
            seen.benign_since_s = now_s
        if now_s - seen.benign_since_s >= self._hold_s:
            seen.filtered_ids = frozenset()
            seen.benign_since_s = None

    def _class(self, now_s: float, class_hash: int) -> RequestClass:
        known = self._classes.get(class_hash)
        if known is not None:
            return known
        if len(self._classes) >= 2 * self._max_classes:
            self._keep_the_most_hit(now_s)
        counts = SlidingCount(self._window_s), SlidingCount(self._window_s)
        return self._classes.setdefault(class_hash, RequestClass(*counts))

    def _keep_the_most_hit(self, now_s: float) -> None:
        """Among equals, the younger classes stay. Sorting once per `max_classes` new ones costs little for each."""
        youngest_first = reversed(self._classes.items())
        most_hit = sorted(youngest_first, key=lambda item: -item[1].hit_tokens.total(now_s))[: self._max_classes]
        self._classes = dict(reversed(most_hit))
