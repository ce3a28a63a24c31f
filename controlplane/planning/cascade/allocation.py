"""GPUs to tiers so that L is as low as can be: the slowest tier's (Cascadia, section 3.2), or the sum over tiers of
share times latency.

`allocate` solves a mixed-integer program, for the slowest tier the paper's. `lowest_latency_s` gives its objective
value alone, which a search over thresholds asks for hundreds of times: latencies fall with GPUs, so for the slowest
tier the cheapest allocations within a given latency add up to the least that reaches it, and the latency is found by
bisection; the sum is found tier by tier, as in a knapsack. A test holds program and search together.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cascade_goal import Minimise
from mesh.errors import PlanInfeasible

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt

SOLVER_SECONDS = 10.0
_SLACK = 1e-9


def lowest_latency_s(
    tables_s: Sequence[NDArray[np.float64]], shares: Sequence[float], gpus: int, minimise: Minimise = "slowest_tier"
) -> float:
    """The least possible L with the sum of f_i within `gpus`; infinite if none is.

    `tables_s[i][f]` is l_i(f), f = 0..gpus, not rising with f; `shares[i]` the part of all requests that reaches i.
    """
    if minimise == "slowest_tier":
        return _lowest_maximum_s(tables_s, gpus)
    return _lowest_sum_s(tables_s, shares, gpus)


def allocate(
    tables_s: Sequence[NDArray[np.float64]], shares: Sequence[float], gpus: int, minimise: Minimise = "slowest_tier"
) -> tuple[int, ...]:
    """f_i of every tier.

    Among allocations with the least L, for the slowest tier the one with the least mean over requests of the latency
    summed over the tiers that they pass; of those one with few GPUs: what would not help stays free (table 2 has tiers
    with none). Raises `PlanInfeasible` where no allocation holds the rates.
    """
    from ortools.math_opt.python import mathopt  # a second to import, which only plans need

    latency_s = lowest_latency_s(tables_s, shares, gpus, minimise)
    if not np.isfinite(latency_s):
        raise PlanInfeasible(
            f"{gpus} GPUs do not hold this load, however they are divided: plan for a lower rate, a lower quality "
            "target or more GPUs"
        )
    model = mathopt.Model(name="allocation")
    picked: list[dict[int, mathopt.Variable]] = []
    for tier, table_s in enumerate(tables_s):
        variables = {
            f: model.add_binary_variable(name=f"x_{tier}_{f}") for f in range(gpus + 1) if np.isfinite(table_s[f])
        }
        picked.append(variables)
        model.add_linear_constraint(mathopt.fast_sum(variables.values()) == 1)
    spent = mathopt.fast_sum(f * x for variables in picked for f, x in variables.items())
    model.add_linear_constraint(spent <= gpus)
    if minimise == "slowest_tier":
        values = _least_maximum(model, picked, tables_s, shares, spent / gpus)
    else:
        values = _least_sum(model, picked, tables_s, shares, latency_s, spent)
    return tuple(max(variables, key=lambda f, of=variables: values[of[f]]) for variables in picked)  # type: ignore[misc]


def _lowest_maximum_s(tables_s: Sequence[NDArray[np.float64]], gpus: int) -> float:
    table = np.stack([each[: gpus + 1] for each in tables_s])
    levels = np.unique(table[np.isfinite(table)])
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        within = table <= levels[middle]
        needed = np.where(within.any(axis=1), within.argmax(axis=1), gpus + 1).sum()
        if needed <= gpus:
            high = middle
        else:
            low = middle + 1
    return float(levels[low]) if low < len(levels) else float("inf")


def _lowest_sum_s(tables_s: Sequence[NDArray[np.float64]], shares: Sequence[float], gpus: int) -> float:
    """O(tiers x GPUs x distinct latencies of a table)."""
    least_s: NDArray[np.float64] = np.zeros(gpus + 1)
    """Of the tiers so far on at most g GPUs, g = 0..gpus."""
    for table_s, share in zip(tables_s, shares, strict=True):
        of_tier = table_s[: gpus + 1]
        useful = np.flatnonzero(of_tier < np.append(np.inf, of_tier[:-1]))
        if not len(useful):
            return float("inf")
        before = np.append(np.full(gpus, np.inf), least_s)
        left = gpus + np.arange(gpus + 1) - useful[:, None]
        least_s = (before[left] + share * of_tier[useful, None]).min(axis=0)
    return float(least_s[gpus])


def _least_maximum(
    model: "mathopt.Model",
    picked: "Sequence[dict[int, mathopt.Variable]]",
    tables_s: Sequence[NDArray[np.float64]],
    shares: Sequence[float],
    spent: "mathopt.LinearExpression",
) -> "Mapping[mathopt.Variable, float]":
    bound = model.add_variable(lb=0.0, name="L")
    for table_s, variables in zip(tables_s, picked, strict=True):
        model.add_linear_constraint(_sum((table_s, 1.0, variables)) <= bound)
    model.minimize(bound)
    least_s = _solved(model).objective_value()
    model.add_linear_constraint(bound <= least_s * (1 + _SLACK))
    model.minimize(_sum(*zip(tables_s, shares, picked, strict=True)) + 1e-6 * least_s * spent)
    values: Mapping[mathopt.Variable, float] = _solved(model).variable_values()
    return values


def _least_sum(
    model: "mathopt.Model",
    picked: "Sequence[dict[int, mathopt.Variable]]",
    tables_s: Sequence[NDArray[np.float64]],
    shares: Sequence[float],
    unit_s: float,
    spent: "mathopt.LinearExpression",
) -> "Mapping[mathopt.Variable, float]":
    """In units of about the result, because the solver's tolerances are absolute."""
    total = _sum(*((table_s / unit_s, share, of) for table_s, share, of in zip(tables_s, shares, picked, strict=True)))
    model.minimize(total)
    least = _solved(model, gap=0.0).objective_value()
    model.add_linear_constraint(total <= least * (1 + _SLACK))
    model.minimize(spent)
    values: Mapping[mathopt.Variable, float] = _solved(model, gap=0.0).variable_values()
    return values


def _sum(*tiers: "tuple[NDArray[np.float64], float, dict[int, mathopt.Variable]]") -> "mathopt.LinearExpression":
    """Of share times latency over the (table, share, variables) of tiers."""
    from ortools.math_opt.python import mathopt

    return mathopt.fast_sum(share * float(table[f]) * x for table, share, of in tiers for f, x in of.items())


def _solved(model: "mathopt.Model", gap: float | None = None) -> "mathopt.SolveResult":
    """`gap`: how far from the optimum it may end, absolutely and relatively; None: as the solver is set."""
    from ortools.math_opt.python import mathopt

    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=SOLVER_SECONDS), relative_gap_tolerance=gap, absolute_gap_tolerance=gap
    )
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
    if result.termination.reason is not mathopt.TerminationReason.OPTIMAL:
        raise PlanInfeasible(f"the allocation was not solved within {SOLVER_SECONDS:g} s: {result.termination.detail}")
    return result
