"""How much longer decode attention takes where the contexts of a batch differ, fitted to measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.least_squares import non_negative_least_squares
from mesh.errors import ConfigurationError
from simulator.cost.fitted.interpolation import Curve
from simulator.cost.roofline.lengths import MAXIMUM, MINIMUM, DecodeLengths, Numbers

Floats = NDArray[np.float64]

TILES = tuple(float(1 << power) for power in range(2, 12))
MEAN_TOKENS = (256.0, 1024.0, 4096.0, 8192.0)


class Unevenness(Protocol):
    """Of one layer's decode attention, beside that of equal contexts of the same total."""

    def stretch(self, lengths: DecodeLengths) -> Numbers:
        """How many times as long it takes, where a step only decodes; a number for a step, an array for a run."""
        ...

    def beside_prompt_ms(self, lengths: DecodeLengths, level_ms: float) -> float:
        """How much longer it takes in a step that computes prompt tokens, too. `level_ms`: of equal contexts alone."""
        ...


class UnevennessTable(msgspec.Struct, frozen=True):
    """What was measured on one card.

    Both parts grow with how far the longest context is above the mean. What else they depend on is how many tiles there
    are for the multiprocessors: a KV head of a decoding request is one tile at least. Between the points of an axis
    values are interpolated (over the logarithm of the tiles), outside of it they stay as at its end.
    """

    multiprocessors: int
    """Of the card. On another one so many times as many tiles stand for the same load."""
    tiles: tuple[float, ...]
    mean_tokens: tuple[float, ...]
    stretch: tuple[tuple[float, ...], ...]
    """A row for each entry of `tiles`, in it a value for each of `mean_tokens`: the share by which attention takes
    longer for each mean that the longest context is above the mean."""
    beside_prompt_us: tuple[float, ...]
    """For each entry of `tiles`: what each token of the longest context above the mean adds in a step that computes
    prompt tokens, too. Such a step does not split contexts, so everything waits for the longest."""

    def __post_init__(self) -> None:
        rows = {len(self.beside_prompt_us), len(self.stretch), len(self.tiles)}
        if len(rows) > 1 or {len(row) for row in self.stretch} != {len(self.mean_tokens)}:
            raise ConfigurationError("a table of unevenness needs a row for each number of tiles, of a value a mean")
        for axis in (self.tiles, self.mean_tokens):
            if len(axis) < 2 or any(left >= right for left, right in pairwise(axis)):
                raise ConfigurationError("the axes of a table of unevenness are two points or more, and increase")


class MeasuredUnevenness:
    """A table's, for a model on some device."""

    def __init__(self, table: UnevennessTable, kv_heads: int, multiprocessors: int) -> None:
        """`kv_heads`: on one device; `multiprocessors` of that device."""
        self.table = table
        self._tiles = kv_heads * table.multiprocessors / multiprocessors
        self._rows: dict[int, tuple[Curve, float]] = {}

    def stretch(self, lengths: DecodeLengths) -> Numbers:
        minimum, maximum = MINIMUM[lengths.is_run], MAXIMUM[lengths.is_run]
        axis = self.table.mean_tokens
        mean = lengths.total / lengths.requests
        row, _ = self._row(lengths.requests)
        inside = maximum(minimum(mean, axis[-1]), axis[0])
        share = row.at_all(inside) if lengths.is_run else row.at(inside)
        return 1.0 + share * (lengths.longest / mean - 1.0)

    def beside_prompt_ms(self, lengths: DecodeLengths, level_ms: float) -> float:
        _, token_ms = self._row(lengths.requests)
        return float(token_ms * (lengths.longest - lengths.total / lengths.requests))

    def _row(self, requests: int) -> tuple[Curve, float]:
        """The shares over the mean, and ms a token."""
        found = self._rows.get(requests)
        if found is None:
            weights = _weights(np.log2([self._tiles * requests]), np.log2(self.table.tiles))[0]
            shares = tuple((weights @ np.array(self.table.stretch)).tolist())
            token_ms = float(weights @ np.array(self.table.beside_prompt_us)) / 1000
            found = self._rows[requests] = (Curve(self.table.mean_tokens, shares), token_ms)
        return found


@dataclass(frozen=True, slots=True)
class UnevenRow:
    """Attention over contexts of two lengths, measured beside that over equal ones of the same total."""

    kv_heads: int
    requests: int
    longer: int
    """Requests with `long_tokens` of context; the others have `short_tokens`."""
    short_tokens: int
    long_tokens: int
    has_prompt: bool
    """The same kernel also computed a part of a prompt."""
    equal_us: float
    uneven_us: float

    @property
    def mean_tokens(self) -> float:
        shorter = self.requests - self.longer
        return (self.longer * self.long_tokens + shorter * self.short_tokens) / self.requests


def fit_unevenness(rows: Sequence[UnevenRow], multiprocessors: int) -> UnevennessTable:
    """Least squared errors, relative to what was measured; no value negative. Raises `ConfigurationError` where rows
    with a prompt or without are missing."""
    alone = [row for row in rows if not row.has_prompt]
    beside = [row for row in rows if row.has_prompt]
    if not alone or not beside:
        raise ConfigurationError("unevenness is fitted to steps that only decode and to steps with a prompt: both")
    means = np.array([row.mean_tokens for row in alone])
    weights = _tile_weights(alone)[:, :, None] * _weights(means, np.array(MEAN_TOKENS))[:, None, :]
    above = np.array([row.long_tokens for row in alone]) / means - 1.0
    shares = _fit(alone, weights * (above * _equal_us(alone))[:, None, None])
    above_tokens = np.array([row.long_tokens - row.mean_tokens for row in beside])
    token_us = _fit(beside, (_tile_weights(beside) * above_tokens[:, None])[:, :, None])[:, 0]
    return UnevennessTable(
        multiprocessors,
        TILES,
        MEAN_TOKENS,
        tuple(map(tuple, np.round(shares, 4).tolist())),
        tuple(np.round(token_us, 6).tolist()),
    )


def _fit(rows: Sequence[UnevenRow], features: Floats) -> Floats:
    """A value for each point of the grid; `features` has shape (rows, tiles, means)."""
    measured = np.array([row.uneven_us for row in rows])
    flat = features.reshape(len(rows), -1) / measured[:, None]
    values = non_negative_least_squares(flat, 1.0 - _equal_us(rows) / measured).reshape(features.shape[1:])
    seen: NDArray[np.bool_] = np.asarray(features.any(axis=0))
    # Where nothing was measured the nearest measured ones stand in: for as many tiles first, then for as long contexts.
    for lines, seen_lines in ((values.T, seen.T), (values, seen)):
        for line, known in zip(lines, seen_lines, strict=True):
            if known.any() and not known.all():
                places = np.arange(len(line))
                line[:] = np.interp(places, places[known], line[known])
                known[:] = True
    return values


def _equal_us(rows: Sequence[UnevenRow]) -> Floats:
    return np.array([row.equal_us for row in rows])


def _tile_weights(rows: Sequence[UnevenRow]) -> Floats:
    return _weights(np.array([math.log2(row.kv_heads * row.requests) for row in rows]), np.log2(TILES))


def _weights(values: Floats, points: Floats) -> Floats:
    """What each point of an axis counts at each value, by linear interpolation; shape (values, points)."""
    return np.array([np.interp(values, points, each) for each in np.eye(len(points))]).T
