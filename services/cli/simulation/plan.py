"""One simulation from its plan to its outcomes, in whatever process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from controlplane.policies.registry import create_policy
from mesh.errors import ConfigurationError
from services.cli.simulation.costs import CostChoice
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import fit_context
from simulator.traces.source import TraceRecipe, open_trace


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy's name and what differs from its defaults."""

    name: str
    parameters: Mapping[str, float]

    @staticmethod
    def parse(text: str) -> "PolicyChoice":
        """NAME or NAME:PARAMETER=VALUE,... Raises `ConfigurationError`, for unknown names too."""
        name, _, assignments = text.partition(":")
        parameters: dict[str, float] = {}
        for assignment in filter(None, assignments.split(",")):
            parameter, _, value = assignment.partition("=")
            try:
                parameters[parameter] = float(value)
            except ValueError as error:
                raise ConfigurationError(
                    f"policy {text!r}: {assignment!r} is not of the form PARAMETER=NUMBER"
                ) from error
        create_policy(name, parameters)
        return PolicyChoice(name, parameters)


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """All that a simulation is told; equal plans give equal outcomes."""

    recipe: TraceRecipe
    max_requests: int | None
    cluster: ClusterConfig
    policy: PolicyChoice
    costs: CostChoice


def planned_requests(plan: SimulationPlan) -> tuple[list[TraceRequest], int]:
    """The requests, and how many of them had to be shortened to fit the context. Raises TraceError."""
    limit = plan.cluster.instance.max_model_len_tokens
    requests = list(islice(open_trace(plan.recipe), plan.max_requests))
    shortened = sum(request.total_tokens > limit for request in requests)
    return [fit_context(request, limit) for request in requests], shortened


def simulate(
    plan: SimulationPlan, requests: list[TraceRequest], on_progress: Callable[[int], None] | None = None
) -> list[RequestOutcome]:
    """Run it; see `ClusterSimulation.run`."""
    policy = create_policy(plan.policy.name, plan.policy.parameters)
    return ClusterSimulation(requests, plan.cluster, plan.costs.create(), policy).run(on_progress)
