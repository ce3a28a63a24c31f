"""How far the simulator may be from what was measured before `penstock validate` fails."""

from simulator.validation.case import Case
from simulator.validation.latencies import METRICS
from simulator.validation.throughput import MEDIAN_METRIC

ENGINE_RUN_LIMIT = 0.10
THROUGHPUT_LIMIT = 0.20
LIVE_LIMIT = 0.15
LIVE_PREFIX = "live/"


def limit_of(case: Case) -> float | None:
    """The greatest absolute error allowed; None: the case is shown, and nothing is asked of it."""
    if case.metric in METRICS:
        return LIVE_LIMIT if case.name.startswith(LIVE_PREFIX) else ENGINE_RUN_LIMIT
    return THROUGHPUT_LIMIT if case.metric == MEDIAN_METRIC else None


def is_kept(case: Case) -> bool:
    """Whether nothing is asked of the case, or it is within its limit."""
    limit = limit_of(case)
    return limit is None or abs(case.error) <= limit
