"""What a plan's latency L is: of its slowest tier, or of a request from end to end."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from controlplane.model.cascade_goal import Minimise
from controlplane.planning.cascade.replica import Statistic

STATISTIC: Mapping[Minimise, Statistic] = MappingProxyType({"slowest_tier": "p95", "end_to_end": "mean"})
"""Of each tier's latency. Tails of tiers do not add up to the tail of their sum; means do."""
IN_WORDS: Mapping[Minimise, str] = MappingProxyType(
    {"slowest_tier": "p95 of the slowest tier", "end_to_end": "mean from end to end"}
)


def total_latency_s(latencies_s: Sequence[float], shares: Sequence[float], minimise: Minimise) -> float:
    """L of tiers with these latencies (in the statistic of `minimise`) and these shares of the requests.

    The slowest tier's (Cascadia, section 3.2), or the mean over all requests of the sum over the tiers that each
    passes: a request that is escalated waits for every tier on its way and for their judges.
    """
    if minimise == "slowest_tier":
        return max(latencies_s)
    return sum(share * latency_s for share, latency_s in zip(shares, latencies_s, strict=True))
