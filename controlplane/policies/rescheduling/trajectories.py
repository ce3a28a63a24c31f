"""Where the load of instances is going: over the decode steps to come, until the last request is predicted to end.

Every running request grows by a token a step and ends at a length that only a range is known of. What is expected of
an instance, requests and tokens, is therefore linear in time between one possible end and the next.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.policies.rescheduling.selection import Floats, Rows

SHARES: Final = np.array([0.3, 0.4, 0.3])
"""Weights by which the 10, 50 and 90 % quantiles stand for all lengths: Swanson's rule (Hurst, Brown and Swanson,
Swanson's 30-40-30 rule, AAPG Bulletin 84, 2000)."""
SPANS: Final = 24
AT_ONCE: Final = 8
"""Instances whose requests are looked at together: what all requests make up would not fit into the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The decode steps from now to the last end, cut into pieces: short ones at first, since what is near is known
    best, and growing in proportion to the time from now."""

    edges: Floats
    """Shape (spans + 1,), from 0."""
    foresight_steps: float
    """What is so far ahead counts 1/e: until then others have come and gone."""

    @classmethod
    def until(cls, last_step: float, foresight_steps: float) -> "Spans":
        """From now to `last_step`, at least 1."""
        return cls(max(1.0, last_step) * (np.arange(SPANS + 1) / SPANS) ** 2, foresight_steps)

    @property
    def steps(self) -> Floats:
        """Decode steps in each."""
        widths: Floats = np.diff(self.edges)
        return widths

    @property
    def weights(self) -> Floats:
        """Decode steps in each, by how much they count."""
        fading = np.exp(-self.edges / self.foresight_steps)
        weights: Floats = self.foresight_steps * (fading[:-1] - fading[1:])
        return weights

    @property
    def fading(self) -> Floats:
        """By how much the middle of each counts."""
        fading: Floats = np.exp(-self.middles / self.foresight_steps)
        return fading

    @property
    def middles(self) -> Floats:
        """Decode steps from now to the middle of each."""
        middles: Floats = (self.edges[1:] + self.edges[:-1]) / 2
        return middles


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """What is expected, of one or of many; all of shape (..., spans), means over each span."""

    requests: Floats
    tokens: Floats
    """Of their contexts."""
    variance: Floats
    """Of the tokens, the lengths of different requests taken to be independent."""

    def __add__(self, other: "Trajectory") -> "Trajectory":
        return Trajectory(self.requests + other.requests, self.tokens + other.tokens, self.variance + other.variance)

    def __sub__(self, other: "Trajectory") -> "Trajectory":
        return Trajectory(
            self.requests - other.requests, self.tokens - other.tokens, np.maximum(self.variance - other.variance, 0.0)
        )

    def __getitem__(self, rows: Rows | tuple[Rows, None]) -> "Trajectory":
        return Trajectory(self.requests[rows], self.tokens[rows], self.variance[rows])


def of_requests(context_tokens: NDArray[np.int64], ends: Floats, spans: Spans) -> Trajectory:
    """Each request's own, shape (requests, spans). `ends` are the 10, 50 and 90 % quantiles of what remains, shape
    (requests, 3); a request that has outlived them is taken to run through the first span."""
    presence, lasting_spans = np.zeros((len(ends), SPANS)), np.empty((len(ends), SPANS))
    steps = spans.steps
    for share, lasting in zip(SHARES.tolist(), np.maximum(ends, spans.edges[1]).T, strict=True):
        np.subtract(lasting[:, None], spans.edges[:-1], out=lasting_spans)
        lasting_spans /= steps
        np.maximum(lasting_spans, 0.0, out=lasting_spans)
        np.minimum(lasting_spans, 1.0, out=lasting_spans)
        lasting_spans *= share
        presence += lasting_spans
    length = context_tokens[:, None] + spans.middles
    variance = length**2
    variance *= presence
    variance *= 1 - presence
    return Trajectory(presence, np.multiply(length, presence, out=length), variance)


def of_instances(
    context_tokens: NDArray[np.int64], ends: Floats, homes: Rows, instances: int, spans: Spans
) -> Trajectory:
    """The sums over each instance's requests (as `of_requests` has them), shape (instances, spans); `homes` are
    ascending.

    What ends is taken to be replaced, evenly: the placement gives new requests to whoever has least, so that in all
    the load stays what it is now.
    """
    requests, tokens, variance = np.zeros((3, instances, SPANS))
    bounds = np.searchsorted(homes, np.arange(0, instances + AT_ONCE, AT_ONCE)).tolist()
    for start, end in pairwise(bounds):
        if start == end:
            continue
        there, starts = np.unique(homes[start:end], return_index=True)
        own = of_requests(context_tokens[start:end], ends[start:end], spans)
        requests[there] = np.add.reduceat(own.requests, starts, axis=0)
        tokens[there] = np.add.reduceat(own.tokens, starts, axis=0)
        variance[there] = np.add.reduceat(own.variance, starts, axis=0)
    return Trajectory(requests + _lost(requests), tokens + _lost(tokens), variance)


def _lost(load: Floats) -> Floats:
    """By how much the instances carry less than now, on average."""
    mean = load.mean(axis=0)
    lost: Floats = np.maximum(mean[0] - mean, 0.0)
    return lost
