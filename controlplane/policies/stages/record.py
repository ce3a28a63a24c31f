"""What the state store holds about stages, as JSON: the setting, each model's plan, each instance's boundary."""

from typing import Annotated

import msgspec

from controlplane.planning.qoe import QoeModel
from controlplane.planning.stage_partition import PartitionMethod
from controlplane.policies.stages.agent import StageParameters
from controlplane.policies.stages.layout import StageLayout

STAGES_KEY = "/penstock/config/stages"
LAYOUT_PREFIX = "/penstock/stages/layout/"
BOUNDARY_PREFIX = "/penstock/stages/boundary/"


class StagesSetting(msgspec.Struct, frozen=True):
    """Whether, and how, the mesh is staged; operators write it, planner and workers follow it."""

    enabled: bool = False
    method: PartitionMethod = PartitionMethod.EXACT
    cuts_per_octave: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4
    """Candidate boundaries for each doubling of the length; the paper has 1, the exact program affords more."""
    replan_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Between two plans while the instances stay the same."""
    fewest_lengths: Annotated[int, msgspec.Meta(ge=1)] = 50
    """Ended requests that a plan needs."""
    parameters: StageParameters = StageParameters()


class StageRecord(msgspec.Struct, frozen=True):
    """One model's stage plan, with what it was made from."""

    layout: StageLayout
    quality_model: QoeModel
    profile: str
    """Where the quality model comes from."""
    quality: float
    """Predicted: normalised latency in ms per token, summed over the requests in flight."""
    lengths: int
    """Ended requests that it was made from."""
    in_flight: float
    planned_unix_ms: int
    method: PartitionMethod = PartitionMethod.EXACT
    parameters: StageParameters = StageParameters()
    epoch: int = 0
    """Of the planner's leadership; a record of a lower one than was seen before counts for nothing."""
    leader: str = ""
    """Member id of the planner that made it."""


class BoundaryRecord(msgspec.Struct, frozen=True):
    """Where one instance's range ends. Of instances that are not in the plan, or not alive, it counts for nothing."""

    model: str
    instance_id: str
    boundary_tokens: float
    """0: the range has no end."""
    revision: int
    """Of the plan that it refines; one of an older plan counts for nothing."""
    moved_unix_ms: int


def layout_key(model: str) -> str:
    """Where a model's plan stands. Model names may hold slashes; the record names the model."""
    return f"{LAYOUT_PREFIX}{model}"


def boundary_key(instance_id: str) -> str:
    """Where an instance's boundary stands."""
    return f"{BOUNDARY_PREFIX}{instance_id}"
