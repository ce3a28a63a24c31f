"""The samples that a length learner draws from: of the requests that ended last, as many as fit."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mesh.invariants import invariants

MOST_SAMPLES: Final = 16384
"""With states of width 256 some 17 MB."""
_SMALLEST_SPREAD: Final = 1e-3

Drawn = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]


class LearntSamples:
    """A ring: the newest replace the oldest. Rows are kept as they came; `scaled` is what the network sees of them."""

    def __init__(self, width: int) -> None:
        self._rows = np.zeros((MOST_SAMPLES, width), np.float32)
        self._generated = np.zeros(MOST_SAMPLES, np.int32)
        self._remaining = np.zeros(MOST_SAMPLES, np.float32)
        self._weights = np.zeros(MOST_SAMPLES, np.float32)
        self._count = 0
        self._next = 0
        self._ends: NDArray[np.float64] | None = None
        self.mean: NDArray[np.float32] | None = None
        """Of each column when it was first drawn; None before. Shape (width,)."""
        self.spread = np.ones(width, np.float32)

    def __len__(self) -> int:
        return self._count

    def add(
        self,
        rows: NDArray[np.float32],
        generated_tokens: NDArray[np.int32],
        remaining_tokens: NDArray[np.float32],
        weights: NDArray[np.float32],
    ) -> None:
        """Samples, each of which stands for `weights` of its kind. Rows have the shape (samples, width), all else
        (samples,)."""
        at = (self._next + np.arange(len(rows))) % MOST_SAMPLES
        self._rows[at], self._generated[at] = rows, generated_tokens
        self._remaining[at], self._weights[at] = remaining_tokens, weights
        self._next = (self._next + len(rows)) % MOST_SAMPLES
        self._count = min(MOST_SAMPLES, self._count + len(rows))
        self._ends = None

    def draw(self, chance: np.random.Generator, count: int) -> Drawn:
        """So many rows, tokens generated and tokens that came, by weight and with repetition. Raises where there are
        none."""
        if self._ends is None:
            self._ends = np.cumsum(self._weights[: self._count], dtype=np.float64)
        if self.mean is None:
            self._take_scales()
        at = np.searchsorted(self._ends, chance.random(count) * self._ends[-1], side="right")
        at = np.minimum(at, self._count - 1)
        return self._rows[at], self._generated[at], self._remaining[at]

    def scaled(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of mean 0 and deviation 1 when the scales were taken; what is far off counts as ten deviations."""
        if self.mean is None:
            return rows
        scaled: NDArray[np.float32] = np.clip((rows - self.mean) / self.spread, -10.0, 10.0)
        return scaled

    def newest(
        self, count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """The last `count` that were added, oldest first, as `add` takes them."""
        at = (self._next - min(count, self._count) + np.arange(min(count, self._count))) % MOST_SAMPLES
        return self._rows[at], self._generated[at], self._remaining[at], self._weights[at]

    def scales(self) -> NDArray[np.float32]:
        """Means and deviations, shape (2, width); of no rows before they were taken."""
        return np.zeros((0, len(self.spread)), np.float32) if self.mean is None else np.stack([self.mean, self.spread])

    def restore_scales(self, scales: NDArray[np.float32]) -> None:
        """Take over what `scales` told. Raises ValueError for another width."""
        if scales.ndim != 2 or scales.shape[1] != len(self.spread) or len(scales) not in (0, 2):
            raise ValueError(f"scales of the shape {scales.shape} are not for rows of width {len(self.spread)}")
        if len(scales):
            self.mean, self.spread = scales[0], scales[1]

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the ring contradicts itself."""
        assert 0 <= self._count <= MOST_SAMPLES, "samples are bounded"
        assert 0 <= self._next < MOST_SAMPLES, "the next place lies in the ring"
        assert (self._weights[: self._count] > 0).all(), "each sample stands for something"
        assert (self._remaining[: self._count] >= 1).all(), "samples are of running requests"

    def _take_scales(self) -> None:
        rows = self._rows[: self._count]
        self.mean = rows.mean(axis=0)
        self.spread = np.maximum(rows.std(axis=0), _SMALLEST_SPREAD)
