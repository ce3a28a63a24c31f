"""One simulation from its plan to its outcomes, in whatever process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from controlplane.policies.arrow.profiled import profiled
from controlplane.policies.interface import Policy
from controlplane.policies.registry import create_policy
from services.cli.simulation.assignments import parse_assignments
from services.cli.simulation.costs import CostChoice
from services.cli.simulation.rescheduling import ReschedulerChoice
from services.cli.simulation.run import RECORDING, SimulationRun, load_rows, run_of
from simulator.cluster.config import ClusterConfig
from simulator.cluster.control import Controller
from simulator.cluster.simulation import ClusterSimulation
from simulator.report.report import Slo, summarise
from simulator.report.table import report_rows
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import fit_context
from simulator.traces.source import TraceRecipe, open_trace

if TYPE_CHECKING:
    from services.cli.console.simulated import SimulationRecorder

DEFAULT_TTFT_MS = 1000.0
DEFAULT_TPOT_MS = 100.0
"""Objectives of a console where the command has none: the frontends' own defaults."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy's name and what differs from its defaults."""

    name: str
    parameters: Mapping[str, float]

    @staticmethod
    def parse(text: str, settings: Sequence[str] = ()) -> "PolicyChoice":
        """NAME or NAME:PARAMETER=VALUE,...; `settings` are further PARAMETER=VALUE. Raises `ConfigurationError`, for
        unknown names too."""
        joined = ",".join((text.partition(":")[2], *settings)).strip(",")
        name, parameters = parse_assignments("policy", f"{text.partition(':')[0]}:{joined}")
        create_policy(name, parameters)
        return PolicyChoice(name, parameters)


@dataclass(frozen=True, slots=True)
class ConsoleChoice:
    """How a simulation is recorded for the console."""

    name: str
    """What the run is called there."""
    slo: Slo
    max_bytes: int
    """Of its JSON."""


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Everything that a simulation depends on: equal plans give equal outcomes."""

    recipe: TraceRecipe
    max_requests: int | None
    cluster: ClusterConfig
    policy: PolicyChoice
    costs: CostChoice
    rescheduler: ReschedulerChoice
    console: ConsoleChoice | None = None
    """None: it is not recorded for the console."""


def planned_requests(plan: SimulationPlan) -> tuple[list[TraceRequest], int]:
    """The requests, and how many of them had to be shortened to fit the context. Raises TraceError."""
    limit = plan.cluster.instance.max_model_len_tokens
    requests = list(islice(open_trace(plan.recipe), plan.max_requests))
    shortened = sum(request.total_tokens > limit for request in requests)
    return [fit_context(request, limit) for request in requests], shortened


def simulate(
    plan: SimulationPlan, requests: list[TraceRequest], on_progress: Callable[[int], None] | None = None
) -> SimulationRun:
    """Replay `requests` through a simulated cluster. `on_progress` is called with the number of finished requests."""
    policy = create_policy(plan.policy.name, plan.policy.parameters)
    if plan.costs.profile is not None:
        policy = create_policy(plan.policy.name, profiled(policy.parameters, plan.costs.profile))
    controllers: list[Controller] = [*plan.rescheduler.controllers(plan.recipe.seed)]
    recorder = None if plan.console is None else _recorder(plan, plan.console, policy, requests[-1].arrival_s)
    if recorder is not None:
        controllers.append(recorder)
    simulation = ClusterSimulation(requests, plan.cluster, plan.costs.create(), policy, controllers, RECORDING)
    outcomes = simulation.run(on_progress)
    if recorder is None or plan.console is None:
        return run_of(simulation, outcomes)
    report = summarise(outcomes, plan.console.slo, policy=plan.console.name, seed=plan.recipe.seed)
    encode, max_bytes = recorder.recorder.encode, plan.console.max_bytes
    return run_of(simulation, outcomes, lambda load: encode({**report_rows(report), **load_rows(load)}, max_bytes))


def _recorder(plan: SimulationPlan, console: ConsoleChoice, policy: Policy, arrivals_s: float) -> "SimulationRecorder":
    # Here, because it brings gRPC and the frontend's console along, which other simulations have no use for.
    from services.cli.console.simulated import SimulationRecorder
    from services.frontend.console.window import Objectives

    slo = console.slo
    objectives = Objectives(slo.ttft_ms or DEFAULT_TTFT_MS, slo.tpot_ms or DEFAULT_TPOT_MS)
    return SimulationRecorder.of(console.name, policy, plan.rescheduler.mode, objectives, arrivals_s)
