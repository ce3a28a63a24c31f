"""What the rescheduler decides about, and what it says."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.model.migration_order import MigrationOrder
from controlplane.policies.rescheduling.decode_load import DecodeLoad
from controlplane.policies.rescheduling.parameters import ReschedulerMode


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInstance:
    """One instance of the model whose requests may be moved."""

    instance_id: str
    capacity_tokens: int
    """Tokens that its KV memory holds."""
    step_ms: float
    """T_exec: duration of a decode step; 0 if it has made none."""
    may_receive: bool
    """Whether requests may be moved to it."""
    load: DecodeLoad


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly the load lies."""

    mean_tokens: float
    variance: float
    """Of the token loads now, sigma_0^2 of equation (3)."""
    expected_variance: float
    """Equation (4); in mode `current` the same as `variance`."""


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """What Algorithm 1 decided in one interval, and by which numbers."""

    mode: ReschedulerMode
    orders: tuple[MigrationOrder, ...]
    gains: tuple[float, ...]
    """By how much each order lowers the expected variance."""
    overloaded: tuple[str, ...]
    underloaded: tuple[str, ...]
    candidates: int
    """Pairs of a request and a target that passed the filters of phase 2."""
    balance: Balance | None
    """None where there is no instance."""


def load_matrix(instances: Sequence[DecodeInstance], points: int) -> NDArray[np.float64]:
    """Token loads now and over the first `points` of the horizon, shape (instances, points)."""
    matrix = np.empty((len(instances), points))
    for row, instance in enumerate(instances):
        matrix[row] = instance.load.future_tokens[:points]
    return matrix
