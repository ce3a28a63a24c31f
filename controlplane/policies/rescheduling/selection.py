"""Which of the moves that are open are made: the best, then the best that shares no instance with it, and so on."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


def best_moves(gains: Floats, sources: Rows, targets: Rows, most: int) -> list[tuple[int, int, float]]:
    """(request, target, gain) of up to `most` moves. `gains` has shape (targets, requests), -inf where a move is not
    open; `sources` are the requests' instances, equal ones side by side. Moves between disjoint pairs do not change
    each other's gain, so one matrix serves them all."""
    chosen: list[tuple[int, int, float]] = []
    if not gains.size:
        return chosen
    own, starts = np.unique(sources, return_index=True)
    best = np.maximum.reduceat(gains, starts, axis=1)
    ends = np.append(starts[1:], len(sources))
    while len(chosen) < most:
        target, source = divmod(int(best.argmax()), len(own))
        gain = float(best[target, source])
        if not gain > 0:
            break
        row = int(starts[source]) + int(gains[target, starts[source] : ends[source]].argmax())
        chosen.append((row, int(targets[target]), gain))
        used = (own[source], targets[target])
        best[np.isin(targets, used)] = -np.inf
        best[:, np.isin(own, used)] = -np.inf
    return chosen


def cut_off(targets: Sequence[str], keys: Sequence[str], forbidden: Mapping[str, frozenset[str]]) -> NDArray[np.bool_]:
    """Whether a target is forbidden to a request's key (its frontend, or itself), shape (targets, requests)."""
    numbers = {key: number for number, key in enumerate(key for key in dict.fromkeys(keys) if key in forbidden)}
    cut = np.zeros((len(targets), len(numbers) + 1), dtype=np.bool_)  # the last column is for all others
    for key, number in numbers.items():
        cut[:, number] = [target in forbidden[key] for target in targets]
    of_requests: NDArray[np.bool_] = cut[:, [numbers.get(key, -1) for key in keys]]
    return of_requests
