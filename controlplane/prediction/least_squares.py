"""Least squares without negative coefficients: what every fit of costs to a profile rests on."""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def non_negative_least_squares(features: Matrix, targets: Matrix) -> Matrix:
    """The x >= 0 of least |features x - targets| (Lawson and Hanson 1974, chapter 23: the active set method).

    Columns are scaled to norm 1, because pairs of tokens are many orders of magnitude above counts. A column that is
    all 0 gets 0.
    """
    norms = np.linalg.norm(features, axis=0)
    usable = norms > 0
    scaled = features[:, usable] / norms[usable]
    columns = scaled.shape[1]
    chosen = np.zeros(columns, dtype=bool)
    x = np.zeros(columns)
    tolerance = 1e-12 * max(1.0, float(np.abs(scaled.T @ targets).max(initial=0.0)))
    for _ in range(10 * columns):
        gradient = scaled.T @ (targets - scaled @ x)
        if chosen.all() or gradient[~chosen].max() <= tolerance:
            break
        chosen[np.flatnonzero(~chosen)[gradient[~chosen].argmax()]] = True
        x, chosen = _feasible(scaled, targets, x, chosen)
    solution = np.zeros(features.shape[1])
    solution[usable] = x / norms[usable]
    return solution


def _feasible(
    scaled: Matrix, targets: Matrix, x: Matrix, chosen: NDArray[np.bool_]
) -> tuple[Matrix, NDArray[np.bool_]]:
    """Solve on the chosen columns; those that would turn negative leave, each step as far as allowed."""
    chosen = chosen.copy()
    while True:
        trial = np.zeros_like(x)
        trial[chosen] = np.linalg.lstsq(scaled[:, chosen], targets, rcond=None)[0]
        leaving = chosen & (trial <= 0)
        if not leaving.any():
            return trial, chosen
        steps = x[leaving] / np.maximum(x[leaving] - trial[leaving], 1e-300)
        x = x + float(steps.min()) * (trial - x)
        chosen &= x > 1e-14
        x = np.where(chosen, x, 0.0)
        if not chosen.any():
            return x, chosen
