"""GPUs to tiers so that the slowest tier is as fast as can be (Cascadia, section 3.2).

`allocate` solves the paper's mixed-integer program. `lowest_latency_s` gives its objective value alone, which a search
over thresholds asks for hundreds of times: latencies fall with GPUs, so the tiers' cheapest allocations within a given
latency add up to the least that reaches it, and the latency is found by bisection. A test holds the two together.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mesh.errors import PlanInfeasible

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt

SOLVER_SECONDS = 10.0
_SLACK = 1e-9


def lowest_latency_s(tables_s: Sequence[NDArray[np.float64]], gpus: int) -> float:
    """The least possible maximum over tiers of l_i(f_i) with the sum of f_i within `gpus`; infinite if none is.

    `tables_s[i][f]` is l_i(f), f = 0..gpus, not rising with f.
    """
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


def allocate(tables_s: Sequence[NDArray[np.float64]], shares: Sequence[float], gpus: int) -> tuple[int, ...]:
    """f_i of every tier.

    Among allocations with the least maximum latency, the one with the least mean over requests of the latency summed
    over the tiers that they pass; of those one with few GPUs: what would not help stays free (table 2 has tiers with
    none). Raises `PlanInfeasible` where no allocation holds the rates.
    """
    from ortools.math_opt.python import mathopt  # a second to import, which only plans need

    latency_s = lowest_latency_s(tables_s, gpus)
    if not np.isfinite(latency_s):
        raise PlanInfeasible(
            f"{gpus} GPUs do not hold this load, however they are divided: plan for a lower rate, a lower quality "
            "target or more GPUs"
        )
    model = mathopt.Model(name="allocation")
    bound = model.add_variable(lb=0.0, name="L")
    picked: list[dict[int, mathopt.Variable]] = []
    for tier, table_s in enumerate(tables_s):
        variables = {
            f: model.add_binary_variable(name=f"x_{tier}_{f}") for f in range(gpus + 1) if np.isfinite(table_s[f])
        }
        picked.append(variables)
        model.add_linear_constraint(mathopt.fast_sum(variables.values()) == 1)
        model.add_linear_constraint(mathopt.fast_sum(float(table_s[f]) * x for f, x in variables.items()) <= bound)
    spent = mathopt.fast_sum(f * x for variables in picked for f, x in variables.items())
    model.add_linear_constraint(spent <= gpus)
    model.minimize(bound)
    least_s = _solved(model).objective_value()
    model.add_linear_constraint(bound <= least_s * (1 + _SLACK))
    mean_s = mathopt.fast_sum(
        share * float(table_s[f]) * x
        for share, table_s, variables in zip(shares, tables_s, picked, strict=True)
        for f, x in variables.items()
    )
    model.minimize(mean_s + 1e-6 * least_s / gpus * spent)
    values = _solved(model).variable_values()
    return tuple(max(variables, key=lambda f, of=variables: values[of[f]]) for variables in picked)  # type: ignore[misc]


def _solved(model: "mathopt.Model") -> "mathopt.SolveResult":
    from ortools.math_opt.python import mathopt

    parameters = mathopt.SolveParameters(time_limit=timedelta(seconds=SOLVER_SECONDS))
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
    if result.termination.reason is not mathopt.TerminationReason.OPTIMAL:
        raise PlanInfeasible(f"the allocation was not solved within {SOLVER_SECONDS:g} s: {result.termination.detail}")
    return result
