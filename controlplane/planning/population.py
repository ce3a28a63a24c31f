"""The requests in flight, by length: what a stage plan is made from.

A plan is made from finished requests (input and output lengths), but its quality model speaks of batches. Between the
two stands the population in flight: at any moment a request with output O has some length between I and I + O, each as
likely, and it is in flight for a time proportional to O. CascadeInfer (section 4.2) speaks of "requests whose sequence
lengths lie in [l', l]" and of "sequence fragments straddling the cut"; this is our reading of both.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import ConfigurationError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """Lengths of the requests of a period, and how many were in flight together."""

    input_tokens: Floats
    """Shape (requests,)."""
    output_tokens: Floats
    """Shape (requests,); each at least 1."""
    in_flight: float
    """Requests in flight at one time on all instances, on average."""

    @staticmethod
    def of(input_tokens: NDArray[Any], output_tokens: NDArray[Any], in_flight: float) -> "Population":
        """Raises `ConfigurationError` for no requests, unequal shapes or lengths out of range."""
        inputs = np.asarray(input_tokens, dtype=np.float64)
        outputs = np.asarray(output_tokens, dtype=np.float64)
        if inputs.ndim != 1 or inputs.shape != outputs.shape or not len(inputs):
            raise ConfigurationError("a population needs as many input as output lengths, and at least one of each")
        if not (inputs >= 0).all() or not (outputs >= 1).all() or not in_flight > 0:
            raise ConfigurationError("a population needs inputs >= 0, outputs >= 1 and in_flight > 0")
        return Population(inputs, outputs, in_flight)

    @property
    def longest_tokens(self) -> int:
        """Context length at its end of the longest request."""
        return int((self.input_tokens + self.output_tokens).max())

    def loads_up_to(self, lengths: NDArray[Any]) -> Floats:
        """F_1 to F_4 (see `qoe`) of the requests in flight that are at most so long; shape (lengths, 4)."""
        share = self.in_flight / self.output_tokens.sum()
        loads = np.empty((len(lengths), 4))
        ends = self.input_tokens + self.output_tokens
        squares = self.input_tokens**2
        for row, length in enumerate(np.asarray(lengths, dtype=np.float64).tolist()):
            reached = np.clip(length, self.input_tokens, ends)
            here = reached - self.input_tokens
            loads[row] = (
                here.sum(),
                here @ self.input_tokens,
                here @ squares,
                ((reached**2 - squares) / 2).sum(),
            )
        loads *= share
        return loads

    def prompt_share_up_to(self, lengths: NDArray[Any]) -> Floats:
        """Share of all prompt tokens that are of prompts at most so long; shape (lengths,)."""
        order = np.sort(self.input_tokens)
        sums = np.concatenate([[0.0], np.cumsum(order)])
        share: Floats = sums[np.searchsorted(order, lengths, side="right")] / max(float(sums[-1]), 1.0)
        return share

    def crossings(self, lengths: NDArray[Any]) -> Floats:
        """Requests in flight that cross each length, each weighed by 1 / its output tokens; shape (lengths,).

        Times the duration of one crossing this is what the crossings add to the quality: normalised latency, summed
        over the requests in flight.
        """
        starts = np.sort(self.input_tokens)
        ends = np.sort(self.input_tokens + self.output_tokens)
        crossing = np.searchsorted(starts, lengths, side="right") - np.searchsorted(ends, lengths, side="right")
        weighed: Floats = crossing * (self.in_flight / self.output_tokens.sum())
        return weighed
