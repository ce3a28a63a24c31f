"""Which kinds of replica, and how many of each, hold a load at the least cost (pure).

An integer program: the least sum of n_k times price_k with the sum of n_k times capacity_k at least the load, within
what there is of each kind, a minimum and a maximum of replicas, and a budget. Where nothing within these holds the
load, as much of it as can be, and that at the least cost. Solved by OR-Tools (SCIP); a test holds it against all
combinations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from controlplane.model.replica_kind import KindReplicas, ReplicaKind
from mesh.invariants import invariants

STAY_S: Final = 3600.0
"""What a switch saves counts for so long: it is made where that is more than what the new replicas cost before they
serve."""
NODES: Final = 2_000
"""Of the solver's search tree; a time would let equal cases end differently."""
_SLACK: Final = 1e-6
"""The solver's, relatively: what is held or affordable may be off by so much."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What any mix has to keep."""

    minimum: int
    """Replicas of all kinds together."""
    maximum: int
    budget_per_hour: float = inf


@dataclass(frozen=True, slots=True)
class Mix:
    """Replicas of each kind, in the order of the kinds."""

    kinds: tuple[ReplicaKind, ...]
    counts: tuple[int, ...]
    is_proven: bool = True
    """Whether nothing is cheaper; False: the search ended before that was shown."""

    @property
    def replicas(self) -> int:
        """Of all kinds."""
        return sum(self.counts)

    @property
    def cost_per_hour(self) -> float:
        """Of all of them while they run."""
        return sum(kind.replica_price_per_hour * n for kind, n in zip(self.kinds, self.counts, strict=True))

    @property
    def capacity_per_s(self) -> float:
        """Of all of them together."""
        return sum(kind.capacity_per_s * n for kind, n in zip(self.kinds, self.counts, strict=True))

    @property
    def by_kind(self) -> tuple[KindReplicas, ...]:
        """Those of which there are some."""
        return tuple(
            KindReplicas(n, *kind.key) for kind, n in zip(self.kinds, self.counts, strict=True) if n
        )  # fmt: skip

    def __str__(self) -> str:
        return " + ".join(map(str, self.by_kind)) or "no replica"

    @invariants
    def validate(self) -> None:
        """Check that there are no more than there can be. Raises `InvariantBroken`."""
        assert all(0 <= n <= kind.maximum for kind, n in zip(self.kinds, self.counts, strict=True))


def standing_mix(kinds: tuple[ReplicaKind, ...], by_kind: Sequence[KindReplicas]) -> Mix:
    """What stands of these kinds; others are not counted."""
    found = {each.key: each.replicas for each in by_kind}
    return Mix(kinds, tuple(min(found.get(kind.key, 0), kind.maximum) for kind in kinds))


def cheapest_mix(load_per_s: float, bounds: Bounds, standing: Mix, cold_start_s: float) -> Mix:
    """For a load, beginning with what stands: a replica that is started costs its price for `cold_start_s` more, shared
    out over `STAY_S`, so that savings of nothing switch nothing."""
    started = cold_start_s / STAY_S
    found = _solved(load_per_s, bounds, standing, started) or _solved(
        load_per_s, bounds, standing, started, may_lack=True
    )
    assert found is not None, "no replica at all is within any bounds"
    return found


def next_mix(load_per_s: float, bounds: Bounds, standing: Mix, cold_start_s: float, is_under_way: bool) -> Mix:
    """The cheapest mix, or a step towards it: what is given up for other kinds stays until these serve, where both are
    within the bounds. Where they are not, nothing is switched as long as what stands holds as much. `is_under_way`:
    some of what stands has been ordered and does not serve yet."""
    target = cheapest_mix(load_per_s, bounds, standing, cold_start_s)
    pairs = tuple(zip(target.counts, standing.counts, strict=True))
    grows, shrinks = any(new > old for new, old in pairs), any(new < old for new, old in pairs)
    if not shrinks or not (grows or is_under_way):
        return target
    both = Mix(target.kinds, tuple(map(max, pairs)), target.is_proven)
    if both.replicas <= bounds.maximum and both.cost_per_hour <= bounds.budget_per_hour:
        return both
    is_kept = standing.replicas <= bounds.maximum and standing.cost_per_hour <= bounds.budget_per_hour
    holds = standing.capacity_per_s >= min(load_per_s, target.capacity_per_s) and standing.replicas >= bounds.minimum
    return standing if is_kept and holds else target


def _solved(load_per_s: float, bounds: Bounds, standing: Mix, started: float, *, may_lack: bool = False) -> Mix | None:
    """`started`: the part of its price that a replica which is started costs besides. None: nothing holds the load
    within the bounds. With `may_lack` something always does: first the fewest replicas below the minimum, then the
    least load that is not held, then the least cost."""
    from ortools.math_opt.python import mathopt  # half a second to import, which only policies with kinds need

    kinds = standing.kinds
    model = mathopt.Model(name="mix")
    counts = [
        model.add_integer_variable(lb=0, ub=min(kind.maximum, bounds.maximum), name=str(kind.key)) for kind in kinds
    ]
    replicas = mathopt.fast_sum(counts)
    held_per_s = mathopt.fast_sum(kind.capacity_per_s * n for kind, n in zip(kinds, counts, strict=True))
    per_hour = mathopt.fast_sum(kind.replica_price_per_hour * n for kind, n in zip(kinds, counts, strict=True))
    model.add_linear_constraint(replicas <= bounds.maximum)
    if bounds.budget_per_hour < inf:
        model.add_linear_constraint(per_hour <= bounds.budget_per_hour)
    cost = [per_hour]
    if started > 0:
        for kind, n, stand in zip(kinds, counts, standing.counts, strict=True):
            begun = model.add_variable(lb=0, name=f"started {kind.key}")
            model.add_linear_constraint(begun >= n - stand)
            cost.append(started * kind.replica_price_per_hour * begun)
    # What the minimum lacks, and what of the load is not held.
    lacking, unheld = (model.add_variable(lb=0, ub=inf if may_lack else 0, name=name) for name in ("lacking", "unheld"))
    model.add_linear_constraint(replicas + lacking >= bounds.minimum)
    model.add_linear_constraint(held_per_s + unheld >= load_per_s)
    parameters = mathopt.SolveParameters(node_limit=NODES)
    is_proven = True
    for least in (lacking, unheld) if may_lack else ():
        model.minimize(least)
        found = mathopt.solve(model, mathopt.SolverType.GSCIP, params=parameters)
        is_proven = is_proven and found.termination.reason is mathopt.TerminationReason.OPTIMAL
        model.add_linear_constraint(least <= found.objective_value() + _SLACK * max(1.0, load_per_s))
    model.minimize(mathopt.fast_sum(cost))
    found = mathopt.solve(model, mathopt.SolverType.GSCIP, params=parameters)
    if not found.has_primal_feasible_solution():
        return None
    is_proven = is_proven and found.termination.reason is mathopt.TerminationReason.OPTIMAL
    return Mix(kinds, tuple(round(found.variable_values(n)) for n in counts), is_proven)
