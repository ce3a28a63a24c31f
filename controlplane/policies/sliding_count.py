"""How many events fell into the last window of time, in constant memory."""

from mesh.invariants import invariants

SLICES = 12


class SlidingCount:
    """Counts by slices of a twelfth of the window: an event is forgotten up to a slice before the window is over.

    Time that goes backwards counts as the latest time seen.
    """

    __slots__ = ("_counts", "_latest", "_slice_s", "_total")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / SLICES
        self._counts = [0] * SLICES
        self._latest = 0
        self._total = 0

    def add(self, now_s: float) -> None:
        self._forget_before(now_s)
        self._counts[self._latest % SLICES] += 1
        self._total += 1

    def total(self, now_s: float) -> int:
        """Events in the window that ends at `now_s`."""
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
