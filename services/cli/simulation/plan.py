"""One simulation from its plan to its outcomes, in whatever process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from controlplane.policies.registry import create_policy
from services.cli.simulation.assignments import parse_assignments
from services.cli.simulation.costs import CostChoice
from services.cli.simulation.rescheduling import ReschedulerChoice
from services.cli.simulation.run import RECORDING, SimulationRun, run_of
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import fit_context
from simulator.traces.source import TraceRecipe, open_trace


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
class SimulationPlan:
    """Everything that a simulation depends on: equal plans give equal outcomes."""

    recipe: TraceRecipe
    max_requests: int | None
    cluster: ClusterConfig
    policy: PolicyChoice
    costs: CostChoice
    rescheduler: ReschedulerChoice


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
    controllers = plan.rescheduler.controllers(plan.recipe.seed)
    simulation = ClusterSimulation(requests, plan.cluster, plan.costs.create(), policy, controllers, RECORDING)
    return run_of(simulation, simulation.run(on_progress))
