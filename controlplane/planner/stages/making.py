"""From lengths and a profile to a stage record. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import InstanceProfile
from controlplane.planning.population import Population
from controlplane.planning.qoe import QoeModel
from controlplane.planning.stage_partition import PartitionProblem, find_plan, log_cuts
from controlplane.policies.simulation import SimulationParameters
from controlplane.policies.stages.layout import StageLayout, assign
from controlplane.policies.stages.record import StageRecord, StagesSetting

ONE_GPU = ReplicaShape(1)
DERIVED = "derived from datasheets, not measured: run `penstock profile` for this model and engine"


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """What all workers of a model have told."""

    lengths: tuple[tuple[int, int], ...]
    """Input and output tokens of requests that ended of late."""
    in_flight: float
    """On all workers, on average."""
    transfer_tokens_s: float
    """Context tokens per second of a transfer, the mean of what was measured; 0: nothing was."""


@dataclass(frozen=True, slots=True)
class Quality:
    """A quality model and where it comes from."""

    model: QoeModel
    profile: str


def quality_for(
    profiles: Sequence[InstanceProfile],
    engine: str,
    model: str,
    mean_output_tokens: float,
    shape: ReplicaShape = ONE_GPU,
) -> Quality:
    """The profile of the engine and model; where there is none, coefficients derived for an 8B model on one A100.

    Profiles of instances of this shape go before others. Of profiles of several devices the first by name counts:
    stages are made of equal instances.
    """
    fitting = [each for each in profiles if (each.engine, each.model) == (engine, model)]
    fitting.sort(key=lambda profile: (profile.shape != shape, profile.key))
    if fitting:
        return Quality(fitting[0].qoe.model, fitting[0].key)
    cost = SimulationParameters()
    # In each step of a batch one request in `mean_output_tokens` is replaced, and its prompt computed.
    return Quality(
        QoeModel(
            base_ms=cost.fixed_ms,
            request_ms=cost.decode_request_ms,
            input_token_ms=cost.prefill_token_ms / mean_output_tokens,
            input_token_squared_ms=cost.attended_pair_ms / 2 / mean_output_tokens,
            total_token_ms=cost.context_token_ms,
        ),
        DERIVED,
    )


def make_record(
    model: str,
    instance_ids: Sequence[str],
    statistics: LengthStatistics,
    quality: Quality,
    setting: StagesSetting,
    default_transfer_tokens_s: float,
    before: StageLayout | None,
    now_unix_ms: int,
) -> StageRecord:
    """The best plan for these lengths. `instance_ids` come so that neighbours are close to each other."""
    inputs, outputs = np.array(statistics.lengths, dtype=np.float64).T
    population = Population.of(inputs, outputs, max(statistics.in_flight, 1.0))
    cuts = log_cuts(population.longest_tokens, setting.cuts_per_octave)
    transfer_token_ms = 1000 / (statistics.transfer_tokens_s or default_transfer_tokens_s)
    problem = PartitionProblem.of(population, quality.model, cuts, transfer_token_ms)
    plan = find_plan(problem, len(instance_ids), setting.method)
    revision = 1 if before is None else before.revision + 1
    return StageRecord(
        layout=assign(plan, instance_ids, model=model, revision=revision, before=before),
        quality_model=quality.model,
        profile=quality.profile,
        quality=plan.quality,
        lengths=len(statistics.lengths),
        in_flight=statistics.in_flight,
        planned_unix_ms=now_unix_ms,
        method=setting.method,
        parameters=setting.parameters,
    )
