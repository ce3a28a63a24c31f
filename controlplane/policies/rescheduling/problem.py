"""What the rescheduler decides about, and what it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from controlplane.model.migration_order import MigrationOrder
from controlplane.model.step_costs import StepCosts
from controlplane.policies.rescheduling.decode_load import DecodeLoad
from controlplane.policies.rescheduling.parameters import Horizon, ReschedulerMode


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
    costs: StepCosts | None = None
    """What its steps cost, by a profile; None: nobody knows."""
    stage: int | None = None
    """The stage of lengths that it is in; None: in none. Requests are moved within their stage."""


class Idle(StrEnum):
    """Why an interval ends without an order."""

    BALANCED = "balanced"
    """No instance carries so much more than the mean."""
    NO_TARGET = "no_target"
    """None of those that carry less may be given a request."""
    NOT_WORTH_IT = "not_worth_it"
    """No request that may be moved would run for long enough, or relieve the others enough, to pay for its move."""
    NO_ROOM = "no_room"
    """No target could hold such a request to its end, or its frontend cannot reach it, or it has come from there."""
    NO_GAIN = "no_gain"
    """Every move would make the loads more uneven."""


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
    """What was decided in one interval, and by which numbers."""

    mode: ReschedulerMode
    orders: tuple[MigrationOrder, ...]
    gains: tuple[float, ...]
    """By how much each order lowers the expected variance; in mode `trajectories` what it is worth, in ms."""
    overloaded: tuple[str, ...]
    underloaded: tuple[str, ...]
    candidates: int
    """Pairs of a request and a target that were open to it."""
    balance: Balance | None
    """None where there is no instance."""
    idle: Idle | None = None
    """Why there is no order; None where there is one, or nothing to decide about."""


def load_matrix(instances: Sequence[DecodeInstance], horizon: Horizon) -> NDArray[np.float64]:
    """Token loads now and over the horizon, shape (instances, points). Without a future any horizon's first will do."""
    matrix = np.empty((len(instances), horizon.points))
    for row, instance in enumerate(instances):
        assert horizon.steps == 0 or instance.load.horizon == horizon, "all loads are over one horizon"
        matrix[row] = instance.load.future_tokens[: horizon.points]
    return matrix
