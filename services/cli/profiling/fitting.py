"""Fits an instance profile to measured samples. Pure."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from controlplane.model.step_sample import StepSample
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import InstanceProfile, UnevenPoint
from controlplane.planning.qoe import fit_and_validate
from controlplane.prediction.running_tokens import DecodePoint
from controlplane.prediction.ttft import fit_ttft
from services.cli.profiling.closed_loop import Measured
from services.cli.profiling.plan import Configuration, UnevenPair, uneven_pairs
from services.cli.profiling.samples_file import ProfiledInstance
from simulator.cost.fitted.step_fit import fit_and_validate_steps

MIN_UNEVEN_STEPS = 5


def fit_profile(profiled: ProfiledInstance, measured: Sequence[Measured]) -> InstanceProfile:
    """Fit everything and validate it on held-out parts. Raises `ConfigurationError` for too few samples."""
    rng = np.random.default_rng(profiled.bounds.seed)
    shape = profiled.shape or ReplicaShape(1)
    step = fit_and_validate_steps([step for each in measured for step in each.steps], rng)
    return InstanceProfile(
        engine=profiled.engine,
        model=profiled.model,
        device=profiled.device,
        sizes=profiled.sizes,
        step=step,
        ttft=fit_ttft([point for each in measured for point in each.ttft]),
        decode_points=decode_points(each.steps for each in measured),
        qoe=fit_and_validate([sample for each in measured for sample in each.qoe], rng),
        tensor_parallel=shape.tp,
        pipeline_parallel=shape.pp,
        unevenness=uneven_points(
            uneven_pairs(profiled.bounds, profiled.sizes),
            {each.configuration: each.steps for each in measured},
            step.coefficients.context_token_ms,
        ),
    )


def uneven_points(
    pairs: Sequence[UnevenPair], steps: Mapping[Configuration, Sequence[StepSample]], context_token_ms: float
) -> tuple[UnevenPoint, ...]:
    """Medians of the steps that decode the whole batch and nothing else; pairs without enough of them are left out."""
    points = []
    for pair in pairs:
        even, uneven = (
            [step for step in steps.get(each, ()) if step.decode_requests == each.batch and not step.prefill_tokens]
            for each in (pair.even, pair.uneven)
        )
        if min(len(even), len(uneven)) < MIN_UNEVEN_STEPS:
            continue
        level_ms, level_error_ms = _median([step.duration_ms for step in even])
        uneven_ms, uneven_error_ms = _median([step.duration_ms for step in uneven])
        context_tokens = float(np.median([step.context_tokens for step in even]))
        more_tokens = float(np.median([step.context_tokens for step in uneven])) - context_tokens
        points.append(
            UnevenPoint(
                pair.even.batch,
                context_tokens,
                float(np.median([step.longest_context_tokens for step in uneven])),
                level_ms,
                uneven_ms - more_tokens * context_token_ms,
                float(np.hypot(level_error_ms, uneven_error_ms)),
            )
        )
    return tuple(points)


def _median(values: Sequence[float]) -> tuple[float, float]:
    """And half of its 95 % interval (McGill, Tukey and Larsen 1978: 1.57 x interquartile range / sqrt(n))."""
    quarter, median, three_quarters = np.percentile(values, (25, 50, 75)).tolist()
    return median, 1.57 * (three_quarters - quarter) / len(values) ** 0.5


def decode_points(steps_by_configuration: Iterable[Sequence[StepSample]]) -> tuple[DecodePoint, ...]:
    """Median running tokens and mean step of each configuration's steps that only decode, fewest tokens first."""
    points = []
    for steps in steps_by_configuration:
        decoding = [step for step in steps if step.decode_requests and not step.prefill_tokens]
        if decoding:
            tokens = int(np.median([step.context_tokens for step in decoding]))
            points.append(DecodePoint(tokens, float(np.mean([step.duration_ms for step in decoding]))))
    return tuple(sorted(points, key=lambda point: point.running_tokens))
