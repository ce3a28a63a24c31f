"""Bounded exponential back-off with jitter."""

import random

from mesh.runtime import Clock


class Backoff:
    """Pauses that double from `first_s` up to `most_s`, each shortened by up to half at random."""

    def __init__(self, rng: random.Random, clock: Clock, first_s: float = 0.05, most_s: float = 1.0) -> None:
        self._rng = rng
        self._clock = clock
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def next_s(self) -> float:
        """Length of the next pause."""
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return longest_s * self._rng.uniform(0.5, 1.0)

    async def pause(self) -> None:
        """Sleep for the next pause, longer after each call until `reset`."""
        await self._clock.sleep(self.next_s())

    def reset(self) -> None:
        """Begin anew after a success."""
        self._failures = 0
