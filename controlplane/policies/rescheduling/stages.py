"""Rescheduling where instances form stages of lengths: requests are moved within a stage.

What has outgrown its stage is handed to the next one by the instances themselves (`controlplane/policies/stages`).
"""

from collections.abc import Sequence

import numpy as np

from controlplane.policies.rescheduling.problem import Balance, Idle, Rescheduling


def together(of_stages: Sequence[tuple[int, Rescheduling]], most: int) -> Rescheduling:
    """One decision out of those of the stages, each with its number of instances: the `most` best of their orders.

    The balance is the mean over the stages, weighted by their instances: between stages loads are meant to differ.
    """
    parts = [each for _, each in of_stages]
    ranked = sorted(
        (move for each in parts for move in zip(each.gains, each.orders, strict=True)), key=lambda move: -move[0]
    )[:most]
    idle = [each.idle for each in parts if each.idle is not None]
    return Rescheduling(
        mode=parts[0].mode,
        orders=tuple(order for _, order in ranked),
        gains=tuple(gain for gain, _ in ranked),
        overloaded=tuple(name for each in parts for name in each.overloaded),
        underloaded=tuple(name for each in parts for name in each.underloaded),
        candidates=sum(each.candidates for each in parts),
        balance=_mean(of_stages),
        # The reason of the stage that came closest to a move.
        idle=max(idle, key=list(Idle).index) if idle and not ranked else None,
    )


def _mean(of_stages: Sequence[tuple[int, Rescheduling]]) -> Balance | None:
    balances = [(count, each.balance) for count, each in of_stages if each.balance is not None]
    if not balances:
        return None
    counts = [count for count, _ in balances]
    rows = [(each.mean_tokens, each.variance, each.expected_variance) for _, each in balances]
    return Balance(*np.average(rows, axis=0, weights=counts).tolist())
