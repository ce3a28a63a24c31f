"""Where the boundary between two stages should lie, by the requests on both sides (CascadeInfer, section 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.planning.qoe import QoeModel

Floats = NDArray[np.float64]


class Refinement(StrEnum):
    """What a boundary is moved by."""

    QUALITY = "quality"
    """The least sum of both sides' batch qualities (the paper's)."""
    QUANTITY = "quantity"
    """As many requests on either side; a rival."""
    MEMORY = "memory"
    """As many tokens on either side; a rival."""
    FROZEN = "frozen"
    """Not at all: boundaries stay as planned."""


class RefinementParameters(msgspec.Struct, frozen=True):
    """How readily a boundary moves."""

    policy: Refinement = Refinement.QUALITY
    smoothing: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.2
    """Weight of the newest split in the moving average; the paper gives none."""
    fewest_requests: Annotated[int, msgspec.Meta(ge=2)] = 5
    """With fewer on both sides together the boundary stays."""
    interval_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Between two refinements of one instance."""


@dataclass(frozen=True, slots=True)
class RequestLength:
    """A running request as its neighbours see it."""

    input_tokens: int
    total_tokens: int
    """Input and output so far."""


def even_share(requests: Sequence[RequestLength], parts: int) -> list[RequestLength]:
    """One of `parts` equal parts: sorted by length, from the middle of the first `parts` on every `parts`-th
    (section 4.2, footnote 1)."""
    ordered = sorted(requests, key=lambda request: request.total_tokens)
    return ordered[parts // 2 :: parts]


def best_split(requests: Sequence[RequestLength], policy: Refinement, model: QoeModel) -> int | None:
    """The length at which to divide the requests between two instances; None where the policy has no wish.

    The best of all N splitting points; prefix sums over the sorted requests give all of them at once.
    """
    if policy is Refinement.FROZEN or not requests:
        return None
    ordered = sorted(requests, key=lambda request: request.total_tokens)
    totals = np.array([request.total_tokens for request in ordered], dtype=np.float64)
    inputs = np.array([request.input_tokens for request in ordered], dtype=np.float64)
    return int(totals[int(np.argmin(_split_costs(inputs, totals, policy, model)))])


def _split_costs(inputs: Floats, totals: Floats, policy: Refinement, model: QoeModel) -> Floats:
    """Cost of R[:i] and R[i:] for i = 0..N-1; lower is better."""
    features = np.stack([np.ones_like(totals), inputs, inputs**2, totals], axis=1)
    before = np.vstack([np.zeros(4), np.cumsum(features, axis=0)])
    after = before[-1] - before
    match policy:
        case Refinement.QUANTITY:
            costs: Floats = np.abs(before[:, 0] - after[:, 0])[:-1]
        case Refinement.MEMORY:
            costs = np.abs(before[:, 3] - after[:, 3])[:-1]
        case _:
            costs = (model.batch_quality(before) + model.batch_quality(after))[:-1]
    return costs


class Boundary:
    """The upper end of one instance's range, in tokens; smoothed, and still while there is little traffic."""

    def __init__(self, planned_tokens: float, parameters: RefinementParameters) -> None:
        self.tokens = planned_tokens
        """Starts where the plan has it, which converges faster."""
        self._parameters = parameters

    def refine(
        self,
        own: Sequence[RequestLength],
        successors: Sequence[Sequence[RequestLength]],
        model: QoeModel,
        *,
        lower_tokens: float = 0.0,
        upper_tokens: float = inf,
    ) -> bool:
        """Move towards the best split of this instance's requests and its successors' average; True if it moved.

        It stays strictly between the boundaries of the neighbouring stages.
        """
        if not successors:
            return False
        union = [request for successor in successors for request in successor]
        both = [*own, *even_share(union, len(successors))]
        if len(both) < self._parameters.fewest_requests:
            return False
        split = best_split(both, self._parameters.policy, model)
        if split is None:
            return False
        weight = self._parameters.smoothing
        smoothed = (1 - weight) * self.tokens + weight * split
        before, self.tokens = self.tokens, min(max(smoothed, lower_tokens + 1), max(upper_tokens - 1, lower_tokens + 1))
        return self.tokens != before
