"""The options that describe a simulated cluster."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import click

from controlplane.model.instance import InstancePhase
from mesh.errors import ConfigurationError, TraceError
from services.cli.finite_range import POSITIVE, FiniteRange
from services.cli.report_output import print_notices
from services.cli.simulation.costs import cost_options, costs_of, instance_of
from services.cli.simulation.plan import PolicyChoice, SimulationPlan, planned_requests
from services.cli.simulation.rescheduling import ReschedulerChoice
from services.cli.trace_options import no_requests, recipe_of
from simulator.cluster.config import ClusterConfig, Failure, InstanceSpec, KvLinkConfig, KvReuseConfig
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest

Command = Callable[..., None]

_COUNT = click.IntRange(min=1)

_OPTIONS = (
    click.option("--instances", type=click.IntRange(1, 4096), default=16, show_default=True, help="How many."),
    *cost_options,
    click.option(
        "--kv-blocks",
        type=_COUNT,
        show_default="what the device has beside the model; without --model 26000",
        help="KV blocks of an instance.",
    ),
    click.option("--block-tokens", type=_COUNT, show_default="the profile's, or 16", help="Tokens of a KV block."),
    click.option(
        "--max-model-len",
        type=_COUNT,
        show_default="the model's, or what fits; without --model 131072",
        help="Context in tokens.",
    ),
    click.option("--max-num-seqs", type=_COUNT, show_default="the profile's, or 256", help="Running requests at most."),
    click.option(
        "--max-num-batched-tokens", type=_COUNT, show_default="the profile's, or 2048", help="Token budget of a step."
    ),
    click.option(
        "--report-interval-ms",
        type=FiniteRange(min=0, max=1e6),
        default=50.0,
        show_default=True,
        help="Between two load reports of an instance; 0: just in time for each placement.",
    ),
    click.option(
        "--report-delay-ms",
        type=FiniteRange(min=0, max=1e6),
        default=1.0,
        show_default=True,
        help="From an instance to the scheduler.",
    ),
    click.option(
        "--rescheduler",
        default="off",
        show_default=True,
        metavar="MODE[:PARAMETER=VALUE,...]",
        help="What running requests are moved by: off, current, predicted or trajectories (both with a model of "
        "prediction errors), or oracle (predicted, with their true lengths).",
    ),
    click.option(
        "--prefill-instances",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Number of instances, the first ones, that only prefill; their requests are decoded elsewhere.",
    ),
    click.option(
        "--decode-instances",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Number of instances, the last ones, that only decode.",
    ),
    click.option(
        "--kv-bandwidth",
        "kv_gib_per_s",
        type=POSITIVE,
        default=KvLinkConfig().bandwidth_gib_per_s,
        show_default=True,
        help="GiB/s of an instance's link for KV, sending and receiving together.",
    ),
    click.option(
        "--kv-latency-ms",
        type=FiniteRange(min=0, max=1e6),
        default=KvLinkConfig().latency_ms,
        show_default=True,
        help="Before the bytes of a KV transfer flow.",
    ),
    click.option(
        "--kv-parallel",
        type=_COUNT,
        default=KvLinkConfig().max_parallel,
        show_default=True,
        help="KV transfers of an instance at once.",
    ),
    click.option("--prefix-pull", is_flag=True, help="Let instances pull cached prefixes from each other."),
    click.option(
        "--host-kv-factor",
        type=FiniteRange(min=0, max=1000),
        default=0.0,
        show_default=True,
        help="KV that a host's memory keeps, in multiples of what its instances' GPUs do.",
    ),
    click.option(
        "--host-instances",
        type=_COUNT,
        default=KvReuseConfig().host_instances,
        show_default=True,
        help="Instances on a host.",
    ),
    click.option(
        "--fail",
        "failures",
        multiple=True,
        metavar="INSTANCE@SECONDS[+BACK]",
        help="Instance INSTANCE (from 0) dies at SECONDS and is back BACK seconds later; may be given many times.",
    ),
)


def cluster_options(command: Command) -> Command:
    """Add the options of the simulated cluster to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def cluster_of(options: dict[str, Any]) -> ClusterConfig:
    """The cluster that the options describe. Raises `ConfigurationError`."""
    instance = instance_of(options)
    return ClusterConfig(
        instances=options["instances"],
        instance=instance,
        profiled=None if (profile := costs_of(options).profile) is None else profile.step_costs,
        specs=_specs_of(options, instance),
        link=KvLinkConfig(options["kv_latency_ms"], options["kv_gib_per_s"], options["kv_parallel"]),
        kv_reuse=KvReuseConfig(options["prefix_pull"], options["host_kv_factor"], options["host_instances"]),
        report_interval_ms=options["report_interval_ms"],
        report_delay_ms=options["report_delay_ms"],
        failures=tuple(_failure(text) for text in options["failures"]),
        seed=options["seed"],
    )


def _specs_of(options: dict[str, Any], instance: InstanceConfig) -> tuple[InstanceSpec, ...]:
    count, prefill, decode = options["instances"], options["prefill_instances"], options["decode_instances"]
    if prefill + decode > count:
        raise ConfigurationError(
            f"{prefill} prefill and {decode} decode instances are more than there are, {count}: raise --instances"
        )
    if not prefill and not decode:
        return ()
    both = count - prefill - decode
    phases = [InstancePhase.PREFILL] * prefill + [InstancePhase.ANY] * both + [InstancePhase.DECODE] * decode
    return tuple(InstanceSpec(instance, phase=phase) for phase in phases)


def plan_of(options: dict[str, Any], policy: str, settings: Sequence[str] = ()) -> SimulationPlan:
    """The simulation that a command's options describe, under `policy` with its `settings` (NAME=VALUE). Raises
    `ConfigurationError`."""
    return SimulationPlan(
        recipe=recipe_of(options),
        max_requests=options["max_requests"],
        cluster=cluster_of(options),
        policy=PolicyChoice.parse(policy, settings),
        costs=costs_of(options),
        rescheduler=ReschedulerChoice.parse(options["rescheduler"]),
    )


def read_requests(plan: SimulationPlan) -> list[TraceRequest]:
    """The requests, with what their reader must know on stderr. Raises `click.UsageError` for a trace of no use."""
    try:
        requests, shortened = planned_requests(plan)
    except (TraceError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--trace") from error
    if not requests:
        raise click.BadParameter(no_requests(plan.recipe), param_hint="--trace")
    print_notices([f"{len(requests):,} requests within {requests[-1].arrival_s:,.1f} s"])
    if shortened:
        limit = plan.cluster.instance.max_model_len_tokens
        print_notices(
            [f"WARNING: {shortened:,} of them exceed the context of {limit:,} tokens and are shortened to fit"]
        )
    return requests


def _failure(text: str) -> Failure:
    number, _, times = text.partition("@")
    at_s, _, back_after_s = times.partition("+")
    try:
        times_s = (float(at_s), float(back_after_s) if back_after_s else None)
        if not all(math.isfinite(time_s) for time_s in times_s if time_s is not None):
            raise ValueError("not a finite number")
        return Failure(int(number), *times_s)
    except ValueError as error:
        raise ConfigurationError(
            f"--fail {text!r} is not of the form INSTANCE@SECONDS or INSTANCE@SECONDS+BACK"
        ) from error
