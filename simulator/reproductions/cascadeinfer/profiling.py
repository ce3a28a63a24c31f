"""Profile a modelled instance for the QoE model, as the paper profiles a real one (CascadeInfer, section 4.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from controlplane.planning.qoe import BatchLoad, QoeFit, QoeSample, fit_qoe, relative_error
from simulator.cost.model import CostModel
from simulator.instance.config import InstanceConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance

Lengths = Sequence[tuple[int, int]]
"""Input and output tokens of requests."""
SHORTEST_TOKENS = 100
"""Shorter requests are discarded."""


@dataclass(frozen=True, slots=True)
class ProfileBounds:
    """How long each configuration of a profile is simulated, and up to which lengths and batches."""

    simulated_s: float = 60.0
    """Simulated time of each configuration."""
    largest_batch: int = 1024
    max_steps: int = 4000
    """For each configuration, whatever the time."""
    batch_factor: int = 2
    """Factor from one batch size to the next."""


@dataclass(slots=True)
class _Running:
    input_tokens: int
    output_tokens: int
    submitted_ms: float
    at_start: np.ndarray
    """The time integral of the batch loads when it began."""


def length_buckets(lengths: Lengths) -> list[list[tuple[int, int]]]:
    """[100, 200), [200, 400)... by the lengths at the end; empty ones left out."""
    buckets: dict[int, list[tuple[int, int]]] = {}
    for inputs, outputs in lengths:
        if inputs + outputs >= SHORTEST_TOKENS:
            bucket = int(np.log2((inputs + outputs) / SHORTEST_TOKENS))
            buckets.setdefault(bucket, []).append((inputs, outputs))
    return [buckets[bucket] for bucket in sorted(buckets)]


def profile(
    lengths: Lengths, config: InstanceConfig, cost: CostModel, bounds: ProfileBounds, rng: np.random.Generator
) -> list[QoeSample]:
    """Requests that finished, over all length buckets and batch sizes 1, 2, 4... as far as memory holds them."""
    samples: list[QoeSample] = []
    kv_tokens = config.kv_blocks * config.block_tokens
    for bucket in length_buckets(lengths):
        longest = max(inputs + outputs for inputs, outputs in bucket)
        batch = 1
        while batch <= min(bounds.largest_batch, config.max_batch_requests) and batch * longest <= kv_tokens:
            samples += run_closed_loop(bucket, batch, config, cost, bounds, rng)
            batch *= bounds.batch_factor
    return samples


def run_closed_loop(
    bucket: Lengths,
    batch: int,
    config: InstanceConfig,
    cost: CostModel,
    bounds: ProfileBounds,
    rng: np.random.Generator,
) -> list[QoeSample]:
    """`batch` requests are always in flight: when one finishes, another is submitted."""
    instance = SimulatedInstance(config, cost)
    numbers = count()
    running: dict[str, _Running] = {}
    integral, now_ms = np.zeros(4), 0.0
    loads = np.zeros(4)
    samples: list[QoeSample] = []

    def submit() -> None:
        inputs, outputs = bucket[int(rng.integers(len(bucket)))]
        request_id = f"p{next(numbers)}"
        instance.submit(CountedRequest(request_id, inputs, outputs))
        running[request_id] = _Running(inputs, outputs, now_ms, integral.copy())
        loads[:] += (1, inputs, inputs**2, inputs)

    for _ in range(batch):
        submit()
    for _ in range(bounds.max_steps):
        step = instance.plan_step(now_ms)
        if step is None or now_ms > 1000 * bounds.simulated_s:
            break
        integral += loads * step.duration_ms
        now_ms = step.ends_ms
        result = instance.finish_step(step)
        loads[3] += result.emitted_tokens
        for request_id in result.finished:
            ended = running.pop(request_id)
            elapsed_ms = now_ms - ended.submitted_ms
            mean = (integral - ended.at_start) / elapsed_ms
            samples.append(QoeSample(BatchLoad(*mean.tolist()), elapsed_ms / ended.output_tokens))
            total = ended.input_tokens + ended.output_tokens
            loads[:] -= (1, ended.input_tokens, ended.input_tokens**2, total)
            submit()
    return samples


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The fit that plans are made by, and beside it the published one."""

    fit: QoeFit
    absolute_relative_error: float
    """Of the fit that squares absolute errors."""


def fit_on_halves(
    lengths: Lengths, config: InstanceConfig, cost: CostModel, bounds: ProfileBounds, rng: np.random.Generator
) -> ProfileResult:
    """The data set is split, one part is profiled and fitted, the other profiled the same way and predicted."""
    order = rng.permutation(len(lengths))
    fitted_part, held_out_part = ([lengths[i] for i in half] for half in np.array_split(order, 2))
    fitted = profile(fitted_part, config, cost, bounds, rng)
    held_out = profile(held_out_part, config, cost, bounds, rng)
    model = fit_qoe(fitted)
    mean_ms = float(np.mean([sample.normalised_latency_ms for sample in fitted]))
    measured = np.array([sample.normalised_latency_ms for sample in held_out])
    fit = QoeFit(
        model=model,
        fitted_samples=len(fitted),
        held_out_samples=len(held_out),
        relative_error=relative_error(model, held_out),
        static_relative_error=float(np.mean(np.abs(mean_ms - measured) / measured)),
    )
    return ProfileResult(fit, relative_error(fit_qoe(fitted, relative=False), held_out))
