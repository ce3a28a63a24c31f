"""The worker's half of Algorithm 1: its running requests, and what their tokens come to over the horizon."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.parameters import Horizon

UNKNOWN = -1
"""Remaining tokens of a request that nobody has predicted."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeLoad:
    """One instance's decoding requests at one moment."""

    request_ids: tuple[str, ...]
    context_tokens: Tokens
    """N(r), shape (requests,)."""
    remaining_tokens: Tokens
    """Predicted, UNKNOWN where it is not; shape (requests,)."""
    horizon: Horizon
    future_tokens: Tokens
    """The instance's token load now and at the points of the horizon, shape (horizon.points,)."""
    frontends: tuple[str, ...] = ()
    """The frontend of each request, or empty where there are none, as in a simulation."""
    band_tokens: Tokens | None = None
    """With a probability of 10 and of 90 % as many or fewer remain, shape (2, requests); None: nobody says."""

    def over(self, horizon: Horizon) -> "DecodeLoad":
        """The same requests over another horizon, for the moment in which a worker has not heard of it yet."""
        if horizon == self.horizon:
            return self
        return load_of(
            self.request_ids, self.context_tokens, self.remaining_tokens, horizon, self.frontends, self.band_tokens
        )

    @property
    def tokens(self) -> int:
        """N_i(B_i, 0): the load of this moment."""
        return int(self.future_tokens[0])

    @property
    def longest_tokens(self) -> int:
        """For how long its requests run on, as far as that is predicted; 0 where nothing is."""
        return max(0, int(self.remaining_tokens.max(initial=0)))

    @property
    def predicted_requests(self) -> int:
        """How many have a prediction."""
        return int(np.count_nonzero(self.remaining_tokens != UNKNOWN))


def decode_load(requests: Sequence[RunningRequest], horizon: Horizon) -> DecodeLoad:
    """What a worker reports; O(requests x horizon)."""
    context = np.array([request.context_tokens for request in requests], dtype=np.int64)
    remaining = np.array(
        [UNKNOWN if request.remaining_tokens is None else request.remaining_tokens for request in requests],
        dtype=np.int64,
    )
    frontends = tuple(request.frontend_id for request in requests)
    band: Tokens | None = None
    if any(request.band_tokens is not None for request in requests):
        said = [each.band_tokens or (left, left) for each, left in zip(requests, remaining.tolist(), strict=True)]
        band = np.array(said, dtype=np.int64).T
    return load_of(
        tuple(request.request_id for request in requests),
        context,
        remaining,
        horizon,
        frontends if any(frontends) else (),
        band,
    )


def load_of(
    request_ids: tuple[str, ...],
    context: Tokens,
    remaining: Tokens,
    horizon: Horizon,
    frontends: tuple[str, ...] = (),
    band: Tokens | None = None,
) -> DecodeLoad:
    """The same of what is in arrays already, each of shape (requests,); `remaining` may be UNKNOWN."""
    future = profiles(context, remaining, horizon).sum(axis=0)
    return DecodeLoad(request_ids, context, remaining, horizon, future, frontends, band)


def profiles(context_tokens: Tokens, remaining_tokens: Tokens, horizon: Horizon) -> Tokens:
    """Each request's own token load over the horizon, shape (requests, points).

    A request grows by one token a step and is gone once its predicted remaining length has run out; one without a
    prediction stays, because nothing says that it ends.
    """
    ahead = horizon.ahead_tokens()
    stays = ahead <= last_point(remaining_tokens, horizon)[:, None] * horizon.stride_tokens
    loads: Tokens = (context_tokens[:, None] + ahead) * stays
    return loads


def last_point(remaining_tokens: Tokens, horizon: Horizon) -> Tokens:
    """The last point of the horizon at which each request is still there, shape (requests,); 0 is the present."""
    last = np.clip((remaining_tokens - 1) // horizon.stride_tokens, 0, horizon.steps)
    points: Tokens = np.where(remaining_tokens == UNKNOWN, horizon.steps, last)
    return points
