"""Linear interpolation in measured tables, on one number or on an array of them with the same result.

Between two points a table is a straight line in each axis; below the first it stays at its first value, beyond
the last it goes on as between the last two.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Curve:
    """A function of one variable, given at some points and linear in between."""

    points: tuple[float, ...]
    values: tuple[float, ...]
    _points: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _values: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.points) != len(self.values) or len(self.points) < 2:
            raise ConfigurationError(f"a curve needs two points or more and a value at each, got {len(self.points)}")
        if any(left >= right for left, right in zip(self.points, self.points[1:], strict=False)):
            raise ConfigurationError("the points of a curve must increase")
        object.__setattr__(self, "_points", np.array(self.points, dtype=np.float64))
        object.__setattr__(self, "_values", np.array(self.values, dtype=np.float64))

    def at(self, point: float) -> float:
        """The value at one point."""
        left = min(max(bisect_right(self.points, point) - 1, 0), len(self.points) - 2)
        start, end = self.points[left], self.points[left + 1]
        share = max((point - start) / (end - start), 0.0)
        return self.values[left] + (self.values[left + 1] - self.values[left]) * share

    def at_all(self, points: NDArray[Any]) -> NDArray[np.float64]:
        """The values at many, equal bit for bit to `at` of each."""
        left = np.clip(np.searchsorted(self._points, points, side="right") - 1, 0, len(self.points) - 2)
        start, end = self._points[left], self._points[left + 1]
        share = np.maximum((points - start) / (end - start), 0.0)
        values: NDArray[np.float64] = self._values[left] + (self._values[left + 1] - self._values[left]) * share
        return values


@dataclass(frozen=True, slots=True)
class Grid:
    """Values over several axes, one for each combination of their points."""

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    """The last axis runs fastest."""

    def __post_init__(self) -> None:
        size = int(np.prod([len(axis) for axis in self.axes]))
        if len(self.values) != size or any(len(axis) < 2 for axis in self.axes):
            raise ConfigurationError(
                f"a grid of {[len(axis) for axis in self.axes]} points, at least two in each axis, has {size} "
                f"values, got {len(self.values)}"
            )

    @staticmethod
    def from_points(axes: Sequence[Sequence[float]], points: Mapping[tuple[float, ...], float]) -> "Grid":
        """Raises `ConfigurationError` where a combination was not measured."""
        missing = [place for place in product(*axes) if place not in points]
        if missing:
            raise ConfigurationError(f"{len(missing)} points of a grid were not measured, the first is {missing[0]}")
        return Grid(tuple(tuple(axis) for axis in axes), tuple(points[place] for place in product(*axes)))

    def at(self, *point: float) -> float:
        """The value at one point, multilinear."""
        base = 0
        corners: list[tuple[int, float]] = [(0, 1.0)]
        for axis, value in zip(self.axes, point, strict=True):
            left = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
            share = max((value - axis[left]) / (axis[left + 1] - axis[left]), 0.0)
            base = base * len(axis) + left
            corners = [
                corner
                for place, weight in corners
                for corner in ((place * len(axis), weight * (1 - share)), (place * len(axis) + 1, weight * share))
            ]
        return sum(self.values[base + place] * weight for place, weight in corners if weight)

    def row(self, *point: float) -> Curve:
        """The curve over the last axis at a point in the others."""
        *others, last = self.axes
        if len(point) != len(others):
            raise ConfigurationError(f"a row of {len(self.axes)} axes is at {len(others)} numbers, got {point}")
        return Curve(last, tuple(self.at(*point, value) for value in last))
