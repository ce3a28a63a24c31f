"""The steady state of a deployed cascade: what requests take once a run has forgotten that it began empty.

Several runs, whose seeds are the same for whatever is compared, are made longer until they agree. Neither end of a run
is counted: at its beginning three relaxation times of its queues, and at both ends for as long as long requests take.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.sample import CascadeSample
from simulator.cascade.deployed import Deployed, DrawnRequests, Served, serve
from simulator.cascade.replica import drawn_arrivals_s, drawn_rows, relaxation_requests
from simulator.cascade.tier import Tier
from simulator.report.interval import Estimate

RUNS = 5
SETTLED = 0.05
"""Half of the 95 % interval of each p95, over it, at most; runs are made longer until then."""
_MIN_COUNTED = 1000
_MIN_OF_A_TIER = 300
"""Requests of a run that are counted: of all, and of those that reach a tier."""
_RELAXATIONS = 3.0
"""A run is counted after so many relaxation times: 5 % of what it began with is left then."""
_MAX_COUNTED, _MAX_UNCOUNTED = 16_000, 8_000
"""Requests of a run. A tier that few of them reach, or one near its saturation, may not have settled by then."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Latencies in seconds: means over runs, each with its 95 % interval."""

    p95_s: tuple[Estimate, ...]
    """Each tier's, the judgement of its answers included; 0 where no request comes."""
    mean_s: tuple[Estimate, ...]
    whole_p95_s: Estimate
    """From arrival to the accepted answer."""
    whole_mean_s: Estimate
    growth: Estimate
    """How much longer the second half of the counted requests took than the first, relatively: 0 in a steady state."""
    requests: int
    """Counted of each run."""
    runs: int = RUNS

    @property
    def margin(self) -> float:
        """The widest interval of a p95: half of it, over the p95."""
        return max(each.half / each.mean for each in (*self.p95_s, self.whole_p95_s) if each.mean)

    @property
    def is_overloaded(self) -> bool:
        """Whether requests take longer and longer, which no chance explains: there is no steady state."""
        return self.growth.mean is not None and self.growth.mean - self.growth.half > SETTLED

    @property
    def is_settled(self) -> bool:
        """Whether longer runs would say much the same."""
        return self.margin <= SETTLED and not self.is_overloaded


def steady_state(
    sample: CascadeSample,
    tiers: Sequence[Tier],
    deployed: Deployed,
    utilisations: Sequence[float],
    lasting_s: float,
    judge_s: float,
    seed: int = 0,
) -> SteadyState:
    """Simulate the deployment at the sample's rate.

    `utilisations` are the parts of what each tier's replicas sustain, below 1; long requests take `lasting_s` from end
    to end. Both say how much of a run is left uncounted. Raises `PlanInfeasible` as `serve`.
    """
    reached = [(share, used) for share, used in zip(deployed.shares, utilisations, strict=True) if share > 0]
    relaxation = max(relaxation_requests(used) / share for share, used in reached)
    lasting = int(min(lasting_s * sample.rate_per_s, _MAX_UNCOUNTED / 2))
    warm_up = int(min(lasting + _RELAXATIONS * relaxation, _MAX_UNCOUNTED))
    few = max(_MIN_OF_A_TIER / share for share, _ in reached)
    counted = int(min(max(_MIN_COUNTED, warm_up, few), _MAX_COUNTED))
    while True:
        state = _measured(sample, tiers, deployed, _Window(warm_up, counted, lasting), judge_s, seed)
        if state.is_settled or 2 * counted > _MAX_COUNTED:
            return state
        counted *= 2


@dataclass(frozen=True, slots=True)
class _Window:
    """The part of a run that is counted, in requests in the order of arrival."""

    warm_up: int
    counted: int
    after: int

    @property
    def requests(self) -> int:
        """All of the run."""
        return self.warm_up + self.counted + self.after

    @property
    def end(self) -> int:
        """The first that is not counted any more."""
        return self.warm_up + self.counted


def _measured(
    sample: CascadeSample,
    tiers: Sequence[Tier],
    deployed: Deployed,
    window: _Window,
    judge_s: float,
    seed: int,
) -> SteadyState:
    served = [
        serve(sample, tiers, deployed, _arrivals(sample, window.requests, (seed, run)), judge_s, run)
        for run in range(RUNS)
    ]
    of_tiers = [[_latencies_s(run, tier, window) for run in served] for tier in range(len(tiers))]
    whole = [run.latencies_s[window.warm_up : window.end] for run in served]
    return SteadyState(
        p95_s=tuple(_p95_s(runs) for runs in of_tiers),
        mean_s=tuple(_mean_s(runs) for runs in of_tiers),
        whole_p95_s=_p95_s(whole),
        whole_mean_s=_mean_s(whole),
        growth=Estimate.of([_growth(latencies_s) for latencies_s in whole]),
        requests=window.counted,
    )


def _arrivals(sample: CascadeSample, count: int, seed: tuple[int, int]) -> DrawnRequests:
    rng = np.random.default_rng(seed)
    rows = drawn_rows(rng, sample.requests, count)
    return DrawnRequests(drawn_arrivals_s(rng, sample.rate_per_s, count), rows)


def _latencies_s(served: Served, tier: int, window: _Window) -> NDArray[np.float64]:
    of_tier = served.tiers[tier]
    return of_tier.latencies_s[(of_tier.requests >= window.warm_up) & (of_tier.requests < window.end)]


def _p95_s(runs: Sequence[NDArray[np.float64]]) -> Estimate:
    return Estimate.of([float(np.quantile(run, 0.95)) if len(run) else 0.0 for run in runs])


def _growth(latencies_s: NDArray[np.float64]) -> float:
    first_s, second_s = (float(half.mean()) for half in np.array_split(latencies_s, 2))
    return second_s / first_s - 1


def _mean_s(runs: Sequence[NDArray[np.float64]]) -> Estimate:
    return Estimate.of([float(run.mean()) if len(run) else 0.0 for run in runs])
