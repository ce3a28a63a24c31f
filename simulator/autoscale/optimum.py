"""The least that the SLO could have been held for, by somebody who knew every arrival beforehand (pure)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.autoscale.capacity import CapacityCurve
from simulator.autoscale.mesh import StartUp

_HALVINGS = 14


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """Of one stretch of time."""

    replica_s: float
    kept_share: float
    replicas: NDArray[np.intp]
    """Serving in each bin."""


def optimum(
    arrivals: NDArray[np.int64],
    bin_s: float,
    curve: CapacityCurve,
    times: StartUp,
    share: float,
    minimum: int,
    maximum: int,
) -> Optimum:
    """The cheapest numbers of replicas over bins of arrivals that keep `share` of all requests within the SLO.

    Each replica is paid while it serves, starts and drains. Dynamic programming over the number that serves, with a
    price on late requests that is halved in on until the share is just held. A bin's late requests burden no later
    bin, which favours the optimum: nobody can be cheaper.
    """
    counts = np.arange(minimum, maximum + 1)
    rates = arrivals[:, None] / bin_s / np.maximum(counts, 1)[None, :]
    shares = np.array([[curve.share_at(rate) for rate in row] for row in rates.tolist()])
    shares[:, counts == 0] = 0.0
    late = arrivals[:, None] * (1.0 - shares)
    change = counts[None, :] - counts[:, None]
    moving_s = np.where(change > 0, change * times.cold_start_s, -change * times.drain_s)
    cheap, dear = 0.0, 1.0
    total = max(1, int(arrivals.sum()))
    while _cheapest(counts, late, moving_s, bin_s, dear).kept_share(late, total) < share and dear < 1e6:
        cheap, dear = dear, dear * 4
    best = _cheapest(counts, late, moving_s, bin_s, dear)
    for _ in range(_HALVINGS):
        price = (cheap + dear) / 2
        found = _cheapest(counts, late, moving_s, bin_s, price)
        if found.kept_share(late, total) >= share:
            dear, best = price, found
        else:
            cheap = price
        if dear - cheap < 1e-6 * dear:
            break
    return Optimum(best.replica_s, best.kept_share(late, total), counts[best.path])


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    path: NDArray[np.intp]
    replica_s: float

    def kept_share(self, late: NDArray[np.float64], total: int) -> float:
        return 1.0 - float(late[np.arange(len(self.path)), self.path].sum()) / total


def _cheapest(
    counts: NDArray[np.intp],
    late: NDArray[np.float64],
    moving_s: NDArray[np.float64],
    bin_s: float,
    price_s: float,
) -> _Path:
    """By replica seconds and `price_s` of them for each late request. The first bin's replicas are there already."""
    paid = counts * bin_s + price_s * late
    cost = paid[0]
    came_from = np.zeros(late.shape, np.intp)
    columns = np.arange(len(counts))
    for row in range(1, len(late)):
        ways = cost[:, None] + moving_s
        came_from[row] = ways.argmin(axis=0)
        cost = ways[came_from[row], columns] + paid[row]
    path = np.zeros(len(late), np.intp)
    path[-1] = int(cost.argmin())
    for row in range(len(late) - 1, 0, -1):
        path[row - 1] = came_from[row, path[row]]
    moved = float(moving_s[path[:-1], path[1:]].sum())
    return _Path(path, float(counts[path].sum() * bin_s + moved))
