"""Which requests of a window are taken, and how many there were (pure)."""

import random
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Window(Generic[Item]):
    """What a finished sampling window has collected."""

    items: tuple[Item, ...]
    """A uniform sample of what could be taken."""
    offered: int
    """Number of all items, those only counted included."""
    seconds: float


class SampleWindow(Generic[Item]):
    """Keeps at most `size` of what is offered, each with equal chance (Vitter's algorithm R), until it is closed."""

    def __init__(self, size: int, began_s: float, rng: random.Random) -> None:
        self._size = size
        self._began_s = began_s
        self._rng = rng
        self._items: list[Item] = []
        self._takeable = 0
        self._counted = 0

    def offer(self, item: Item) -> None:
        """Add an item to the window's uniform sample (reservoir sampling), which may drop another one for it."""
        self._takeable += 1
        if len(self._items) < self._size:
            self._items.append(item)
            return
        place = self._rng.randrange(self._takeable)
        if place < self._size:
            self._items[place] = item

    def count(self) -> None:
        """Something that arrived but cannot be taken."""
        self._counted += 1

    def close(self, now_s: float) -> Window[Item]:
        """What the window has collected; the next window begins now."""
        window = Window(tuple(self._items), self._takeable + self._counted, now_s - self._began_s)
        self._began_s, self._items, self._takeable, self._counted = now_s, [], 0, 0
        return window
