"""What operators may set of the rescheduler: its mode and its parameters."""

from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.policies.parameters import PolicyParameters


class ReschedulerMode(StrEnum):
    """What running requests are moved by: as operators choose, or what stands in for it (`ReschedulerSwitch`)."""

    OFF = "off"
    """Nothing is moved."""
    CURRENT = "current"
    """The load of this moment: STAR without prediction."""
    PREDICTED = "predicted"
    """The load of this moment and of the horizon, by predicted remaining lengths."""
    TRAJECTORIES = "trajectories"
    """The time that a move saves everybody until the last predicted end (`TrajectoryPlanner`)."""


PREDICTING = frozenset({ReschedulerMode.PREDICTED, ReschedulerMode.TRAJECTORIES})
"""Modes that need predicted remaining lengths."""


class Horizon(msgspec.Struct, frozen=True):
    """How far ahead a load trace looks, in decode steps; every request generates one token a step."""

    steps: int
    """Points of the trace beyond the present, H of Algorithm 1."""
    stride_tokens: int
    """Decode steps from one point to the next."""

    def fitted(self, longest_tokens: int) -> "Horizon":
        """As many points, no further ahead than the longest request is predicted to run: beyond it all loads are
        nothing, and would hide those that are compared."""
        needed = -(-longest_tokens // self.steps)
        return Horizon(self.steps, max(1, min(needed, self.stride_tokens))) if longest_tokens else self

    @property
    def points(self) -> int:
        """How many points a load trace has, the present one included."""
        return self.steps + 1

    def ahead_tokens(self) -> NDArray[np.int64]:
        """Decode steps from now to each point, shape (points,)."""
        return np.arange(self.points, dtype=np.int64) * self.stride_tokens


class ReschedulerParameters(PolicyParameters, frozen=True, forbid_unknown_fields=True):
    """The paper names these quantities and gives no value for any: the defaults are ours (docs/rescheduling.md)."""

    interval_s: Annotated[float, msgspec.Meta(ge=0.05, le=60)] = 1.0
    """Time from one decision to the next, and from one report of the running requests to the next."""
    theta: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    """How far above the mean an instance's load must be before anything is moved away from it."""
    horizon_steps: Annotated[int, msgspec.Meta(ge=1, le=256)] = 32
    """H: points in the future at which loads are compared."""
    stride_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Decode steps between two such points, at most: fewer where no request is predicted to run to the last of them."""
    decay: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    """Weight of a point relative to the one before it; 1 weighs the whole horizon alike."""
    migration_fixed_ms: Annotated[float, msgspec.Meta(ge=0)] = 50.0
    """C_mig: what a migration takes however short the request is."""
    migration_token_us: Annotated[float, msgspec.Meta(ge=0)] = 20.0
    """C_mig: what each token's KV adds; 20 us is 57 KB over 25 Gbit/s."""
    memory_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    """C_mem: share of an instance's KV memory that a migration may fill; partly filled blocks need the rest."""
    foresight_steps: Annotated[float, msgspec.Meta(ge=1)] = 1000.0
    """Decode steps ahead at which a load counts 1/e of one now, in mode `trajectories`."""
    floor_ms: Annotated[float, msgspec.Meta(ge=0)] = 200.0
    """What a move must save beyond its cost, in mode `trajectories`."""
    migrations: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Most migrations ordered at a time, no two of which share an instance."""

    @property
    def horizon(self) -> Horizon:
        """As the workers are told it."""
        return Horizon(self.horizon_steps, self.stride_tokens)

    def beta(self) -> NDArray[np.float64]:
        """beta_t of equation (4) for the points after the present, shape (horizon_steps,), sum 1."""
        weights = np.power(self.decay, np.arange(self.horizon_steps))
        normalised: NDArray[np.float64] = weights / weights.sum()
        return normalised
