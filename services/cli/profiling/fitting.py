"""Fits an instance profile to measured samples. Pure."""

from collections.abc import Iterable, Sequence

import numpy as np

from controlplane.model.step_sample import StepSample
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import InstanceProfile
from controlplane.planning.qoe import fit_and_validate
from controlplane.prediction.running_tokens import DecodePoint
from controlplane.prediction.ttft import fit_ttft
from services.cli.profiling.closed_loop import Measured
from services.cli.profiling.samples_file import ProfiledInstance
from simulator.cost.fitted.step_fit import fit_and_validate_steps


def fit_profile(profiled: ProfiledInstance, measured: Sequence[Measured]) -> InstanceProfile:
    """Fit everything and validate it on held-out parts. Raises `ConfigurationError` for too few samples."""
    rng = np.random.default_rng(profiled.bounds.seed)
    shape = profiled.shape or ReplicaShape(1)
    return InstanceProfile(
        engine=profiled.engine,
        model=profiled.model,
        device=profiled.device,
        sizes=profiled.sizes,
        step=fit_and_validate_steps([step for each in measured for step in each.steps], rng),
        ttft=fit_ttft([point for each in measured for point in each.ttft]),
        decode_points=decode_points(each.steps for each in measured),
        qoe=fit_and_validate([sample for each in measured for sample in each.qoe], rng),
        tensor_parallel=shape.tp,
        pipeline_parallel=shape.pp,
    )


def decode_points(steps_by_configuration: Iterable[Sequence[StepSample]]) -> tuple[DecodePoint, ...]:
    """Median running tokens and mean step of each configuration's steps that only decode, fewest tokens first."""
    points = []
    for steps in steps_by_configuration:
        decoding = [step for step in steps if step.decode_requests and not step.prefill_tokens]
        if decoding:
            tokens = int(np.median([step.context_tokens for step in decoding]))
            points.append(DecodePoint(tokens, float(np.mean([step.duration_ms for step in decoding]))))
    return tuple(sorted(points, key=lambda point: point.running_tokens))
