"""What the load of an instance costs all who run there, in ms: longer steps, and what happens where memory runs out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.model.step_costs import DATASHEET_COSTS
from controlplane.policies.rescheduling.problem import DecodeInstance
from controlplane.policies.rescheduling.selection import Floats, Rows
from controlplane.policies.rescheduling.trajectories import Spans, Trajectory

_LOGISTIC_SCALE: Final = 3**0.5 / np.pi
"""Scale of a logistic distribution for each unit of its standard deviation."""


_SURELY_ROOM: Final = -40.0
"""Scales above the room at which what lies above it is less than a float can tell from nothing beside one scale. Most
loads are further below, and logarithms are half of a decision's work."""


@dataclass(frozen=True, slots=True, eq=False)
class TimeOfAll:
    """What some loads cost all who are there, in ms; of shape (...,)."""

    total_ms: Floats
    """Until the last end."""
    step_ms: Floats
    """Of it, in one step of the first span."""

    def __sub__(self, other: "TimeOfAll") -> "TimeOfAll":
        return TimeOfAll(self.total_ms - other.total_ms, self.step_ms - other.step_ms)

    def __getitem__(self, rows: Rows | tuple[Rows, None]) -> "TimeOfAll":
        return TimeOfAll(self.total_ms[rows], self.step_ms[rows])


@dataclass(frozen=True, slots=True, eq=False)
class EverybodysTime:
    """The cost model of several instances; arrays of shape (instances, 1)."""

    fixed_ms: Floats
    request_ms: Floats
    token_ms: Floats
    computed_ms: Floats
    """Of a token that is computed anew."""
    pair_ms: Floats
    """Of a token that is computed anew, for each token that it attends to."""
    room_tokens: Floats

    @classmethod
    def of(cls, instances: Sequence[DecodeInstance], memory_fraction: float) -> "EverybodysTime":
        """By the instances' profiles. One without goes by the data sheet of another device, scaled to what its steps
        take: relations between its costs are then a guess, not their height."""
        rows = []
        for instance in instances:
            costs, scale = instance.costs, 1.0
            if costs is None:
                costs = DATASHEET_COSTS
                requests, tokens = len(instance.load.request_ids), instance.load.tokens
                step_ms = costs.fixed_ms + costs.decode_request_ms * requests + costs.context_token_ms * tokens
                scale = instance.step_ms / step_ms if instance.step_ms > 0 else 1.0
            step = (costs.fixed_ms, costs.decode_request_ms, costs.context_token_ms)
            computed = (costs.prefill_token_ms, costs.attended_pair_ms)
            rows.append([scale * each for each in (*step, *computed)] + [instance.capacity_tokens * memory_fraction])
        return cls(*np.array(rows).T[:, :, None])

    def __getitem__(self, rows: Rows | tuple[Rows, None]) -> "EverybodysTime":
        return EverybodysTime(
            *(each[rows] for each in (self.fixed_ms, self.request_ms, self.token_ms)),
            *(each[rows] for each in (self.computed_ms, self.pair_ms, self.room_tokens)),
        )

    def step_ms(self, load: Trajectory) -> Floats:
        """Duration of a step, shape (..., spans)."""
        duration: Floats = self.fixed_ms + self.request_ms * load.requests + self.token_ms * load.tokens
        return duration

    def of_load(self, load: Trajectory, spans: Spans) -> TimeOfAll:
        """The time of all who are there until the last end: the steps of all, the waiting of those that memory has no
        room for, and the computing anew of what they had, once, which all steps there are longer by."""
        excess = self._excess(load)
        context = np.maximum(load.tokens, 1.0) / np.maximum(load.requests, 1e-3)
        steps = self.step_ms(load) * (load.requests + excess / context)
        anew = excess * (self.computed_ms + self.pair_ms / 2 * context) * (load.requests + 1)
        return TimeOfAll(steps @ spans.weights + (anew * spans.fading).max(axis=-1), steps[..., 0])

    def _excess(self, load: Trajectory) -> Floats:
        """Tokens by which the load is expected to exceed the memory: the mean of what lies above, the sum of the
        lengths taken for logistic, which is the normal distribution but for its tails and has this mean in closed
        form."""
        scale = np.sqrt(load.variance)
        scale *= _LOGISTIC_SCALE
        np.maximum(scale, 1.0, out=scale)
        above: Floats = (load.tokens - self.room_tokens) / scale
        np.logaddexp(0.0, above, out=above, where=above > _SURELY_ROOM)
        np.maximum(above, 0.0, out=above)
        above *= scale
        return above
