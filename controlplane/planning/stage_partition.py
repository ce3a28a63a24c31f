"""Length-aware stage partition (CascadeInfer, section 4.2): how many stages, of how many instances, cut where.

The quality of a pipeline is the sum over its stages of (instances) x Q^(requests / instances), by equation 1, and of
the transfer costs of its cuts. `exact_plan` finds the optimum over the candidate cuts by dynamic programming. The
recursion of the paper also counts the stages; their number does not enter the quality, so the minimum over all of them
needs no dimension of its own. `heuristic_plan` is the paper's faster way, `chain_plan` its first phase.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.population import Population
from controlplane.planning.qoe import QoeModel
from controlplane.planning.stage_plan import StagePlan
from mesh.errors import ConfigurationError

Floats = NDArray[np.float64]

PROMPT_SLACK = 0.1
"""A stage may have so much more than its share of the prompts: they are what its instances' steps are full of."""


class PartitionMethod(StrEnum):
    """Algorithms that cut instances into stages, and rival layouts."""

    EXACT = "exact"
    PREFILL = "prefill"
    """Exact among the plans in which no stage computes much more than its share of the prompts. Not in the paper."""
    HEURISTIC = "heuristic"
    CHAIN = "chain"
    """One instance per stage; a rival layout."""
    SINGLE = "single"
    """One stage of all instances; a rival layout."""


@dataclass(frozen=True, slots=True, eq=False)
class PartitionProblem:
    """Costs over the candidate cuts. Cut 0 is length 0, the last cut is beyond every request."""

    cuts_tokens: NDArray[np.int64]
    """Ascending; shape (cuts,)."""
    requests: Floats
    """In flight with lengths between two cuts, [i, j]; shape (cuts, cuts), of use for i < j."""
    load_ms: Floats
    """D_1 F_1 + ... + D_4 F_4 of the same requests."""
    base_ms: float
    """D_0"""
    transfer_ms: Floats
    """c_l of each cut, in the unit of the quality; 0 at cut 0."""
    prompt_share: Floats
    """Of all prompt tokens those of requests that enter between two cuts; shape (cuts, cuts)."""

    @staticmethod
    def of(
        population: Population, model: QoeModel, cuts_tokens: NDArray[np.int64], transfer_token_ms: float
    ) -> "PartitionProblem":
        """`transfer_token_ms` is the time that the KV of one token takes between two instances."""
        loads = population.loads_up_to(cuts_tokens)
        between = loads[None, :, :] - loads[:, None, :]
        np.maximum(between, 0.0, out=between)
        transfer_ms = population.crossings(cuts_tokens) * cuts_tokens * transfer_token_ms
        entering = population.prompt_share_up_to(cuts_tokens)
        return PartitionProblem(
            cuts_tokens,
            between[:, :, 0],
            between @ model.coefficients[1:],
            model.base_ms,
            transfer_ms,
            entering[None, :] - entering[:, None],
        )

    def stage_costs(self, instances: NDArray[np.int64]) -> Floats:
        """Quality of a stage of so many instances between two cuts; shape (instances, cuts, cuts).

        The set is divided evenly, so that each instance has 1/k of each feature: k x Q^(n/k) = n (D_0 + D F / k). It
        is divided into no more parts than it has requests, since half a request is no load that exists.
        """
        parts = np.minimum(instances[:, None, None], np.maximum(self.requests, 1e-12))
        costs: Floats = self.requests * (self.base_ms + self.load_ms / parts)
        return costs

    def stage_cost(self, instances: int, first: int, last: int) -> float:
        """The cost of one stage."""
        requests = float(self.requests[first, last])
        parts = min(instances, max(requests, 1e-12))
        return requests * (self.base_ms + float(self.load_ms[first, last]) / parts)

    def quality(self, instances: tuple[int, ...], cuts: tuple[int, ...]) -> float:
        """Of the pipeline with these cuts (indices, without the first and the last); lower is better."""
        edges = (0, *cuts, len(self.cuts_tokens) - 1)
        stages = sum(self.stage_cost(k, edges[s], edges[s + 1]) for s, k in enumerate(instances))
        return stages + float(self.transfer_ms[list(cuts)].sum())

    def plan(self, instances: tuple[int, ...], cuts: tuple[int, ...]) -> StagePlan:
        """The plan with these cuts."""
        boundaries = tuple(self.cuts_tokens[list(cuts)].tolist())
        return StagePlan(instances, boundaries, self.quality(instances, cuts))


def log_cuts(longest_tokens: int, per_octave: int = 1) -> NDArray[np.int64]:
    """0, then `per_octave` cuts for each doubling (1, 2, 4... for one), the last at least `longest_tokens`."""
    if longest_tokens < 1 or per_octave < 1:
        raise ConfigurationError(f"cuts need longest_tokens and per_octave >= 1, got {longest_tokens}, {per_octave}")
    octaves = int(np.ceil(np.log2(max(longest_tokens, 2))))
    cuts = np.unique(np.round(2 ** (np.arange(octaves * per_octave + 1) / per_octave)).astype(np.int64))
    return np.concatenate([np.zeros(1, dtype=np.int64), cuts])


def find_plan(problem: PartitionProblem, instances: int, method: PartitionMethod) -> StagePlan:
    """Cut the population into stages by the chosen method.

    Raises `ConfigurationError` if there is no instance.
    """
    if instances < 1:
        raise ConfigurationError(f"stages need at least one instance, got {instances}")
    match method:
        case PartitionMethod.EXACT:
            return exact_plan(problem, instances)
        case PartitionMethod.PREFILL:
            return exact_plan(problem, instances, prompt_slack=PROMPT_SLACK)
        case PartitionMethod.HEURISTIC:
            return heuristic_plan(problem, instances)
        case PartitionMethod.CHAIN:
            return chain_plan(problem, instances)
        case PartitionMethod.SINGLE:
            return problem.plan((instances,), ())


def exact_plan(problem: PartitionProblem, instances: int, prompt_slack: float = np.inf) -> StagePlan:
    """The best of all plans, by f[e, l] = min over k, l' of f[e - k, l'] + k Q^(n[l', l] / k) + c[l'].

    Of plans in which a stage's share of the prompt tokens is more than 1 + `prompt_slack` of its share of the instances
    there is none; one stage of all is always within it.

    Among equals, the one whose last stage has more instances and begins earlier. O(instances^2 cuts^2), of which
    numpy does all but one factor of instances.
    """
    cuts = len(problem.cuts_tokens)
    # Ordered by falling number of instances, so that argmin breaks ties as promised.
    descending = np.arange(instances, 0, -1)
    costs = problem.stage_costs(descending) + problem.transfer_ms[:, None]
    costs[:, np.tril_indices(cuts)[0], np.tril_indices(cuts)[1]] = np.inf
    costs[problem.prompt_share > (1 + prompt_slack) / instances * descending[:, None, None]] = np.inf
    best = np.full((instances + 1, cuts), np.inf)
    best[0, 0] = 0.0
    choice = np.zeros((instances + 1, cuts), dtype=np.int64)
    for total in range(1, instances + 1):
        # k = total..1 leaves total - k = 0..total - 1 for the stages before.
        candidates = (best[:total, :, None] + costs[instances - total :]).reshape(total * cuts, cuts)
        choice[total] = np.argmin(candidates, axis=0)
        best[total] = candidates[choice[total], np.arange(cuts)]
    sizes: list[int] = []
    edges: list[int] = []
    total, last = instances, cuts - 1
    while total > 0:
        before, last = divmod(int(choice[total, last]), cuts)
        sizes.append(total - before)
        edges.append(last)
        total = before
    return problem.plan(tuple(reversed(sizes)), tuple(reversed(edges[:-1])))


def chain_plan(problem: PartitionProblem, instances: int) -> StagePlan:
    """The best plan of one instance per stage; the first phase of the heuristic.

    With fewer candidate cuts than instances the instances left over join the stages whose load per instance is
    highest: a stage without a range would serve nothing.
    """
    cuts = len(problem.cuts_tokens)
    stages = min(instances, cuts - 1)
    costs = problem.stage_costs(np.ones(1, dtype=np.int64))[0] + problem.transfer_ms[:, None]
    costs[np.tril_indices(cuts)] = np.inf
    edges = _cheapest_edges(np.broadcast_to(costs, (stages, cuts, cuts)))
    sizes = _spread(problem, edges, instances)
    return problem.plan(sizes, tuple(edges[1:-1]))


def plan_of_sizes(problem: PartitionProblem, sizes: tuple[int, ...]) -> StagePlan:
    """The best boundaries of stages that have these numbers of instances. Raises `ConfigurationError` where there are
    more stages than candidate ranges."""
    cuts = len(problem.cuts_tokens)
    if not 1 <= len(sizes) <= cuts - 1 or min(sizes) < 1:
        raise ConfigurationError(f"1 to {cuts - 1} stages of at least one instance are possible, got {sizes}")
    costs = problem.stage_costs(np.array(sizes)) + problem.transfer_ms[:, None]
    costs[:, np.tril_indices(cuts)[0], np.tril_indices(cuts)[1]] = np.inf
    return problem.plan(sizes, tuple(_cheapest_edges(costs)[1:-1]))


def _cheapest_edges(costs: Floats) -> list[int]:
    """Indices of the cuts around stages that cost `costs[stage, first, last]`, the outermost ones included."""
    stages, cuts, _ = costs.shape
    best = np.full(cuts, np.inf)
    best[0] = 0.0
    choices = []
    for stage in range(stages):
        candidates = best[:, None] + costs[stage]
        choices.append(np.argmin(candidates, axis=0))
        best = candidates.min(axis=0)
    edges = [cuts - 1]
    for choice in reversed(choices):
        edges.append(int(choice[edges[-1]]))
    return edges[::-1]


def _spread(problem: PartitionProblem, edges: list[int], instances: int) -> tuple[int, ...]:
    """One instance for each stage between `edges`, the others one by one where they help most."""
    sizes = [1] * (len(edges) - 1)

    def gain(stage: int) -> float:
        first, last = edges[stage], edges[stage + 1]
        now = problem.stage_cost(sizes[stage], first, last)
        return now - problem.stage_cost(sizes[stage] + 1, first, last)

    for _ in range(instances - len(sizes)):
        sizes[max(range(len(sizes)), key=gain)] += 1
    return tuple(sizes)


def heuristic_plan(problem: PartitionProblem, instances: int) -> StagePlan:
    """The paper's two phases: the best chain, then the merge of neighbours with the highest gain while there is one."""
    chain = chain_plan(problem, instances)
    sizes = list(chain.instances)
    edges = [0, *np.searchsorted(problem.cuts_tokens, chain.boundaries_tokens).tolist(), len(problem.cuts_tokens) - 1]

    def gain(stage: int) -> float:
        first, cut, last = edges[stage : stage + 3]
        apart = problem.stage_cost(sizes[stage], first, cut) + problem.stage_cost(sizes[stage + 1], cut, last)
        merged = problem.stage_cost(sizes[stage] + sizes[stage + 1], first, last)
        return apart + float(problem.transfer_ms[cut]) - merged

    gains = [gain(stage) for stage in range(len(sizes) - 1)]
    while gains and max(gains) > 0:
        stage = gains.index(max(gains))
        sizes[stage : stage + 2] = [sizes[stage] + sizes[stage + 1]]
        del edges[stage + 1], gains[stage]
        for changed in (stage - 1, stage):
            if 0 <= changed < len(gains):
                gains[changed] = gain(changed)
    return problem.plan(tuple(sizes), tuple(edges[1:-1]))
