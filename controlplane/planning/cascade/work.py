"""What requests take on a tier by themselves, whole or given up."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TierWork:
    """Seconds of prefill and of whole answers, and output tokens, for each of a sample's n requests on one tier; shapes
    (n,)."""

    prefill_s: NDArray[np.float64]
    """Up to the first token."""
    whole_s: NDArray[np.float64]
    """Up to the last."""
    output_tokens: NDArray[np.int64]
    """Lengths of the whole answers."""

    def only(self, requests: NDArray[np.intp]) -> "TierWork":
        """The work of these requests (indices) alone, in their order."""
        return TierWork(self.prefill_s[requests], self.whole_s[requests], self.output_tokens[requests])

    def seconds(self, output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """For answers of so many tokens, shape (n,): linear between the first token and the last, because a step costs
        little more for a somewhat longer context."""
        part = (output_tokens - 1) / np.maximum(1, self.output_tokens - 1)
        shortened_s = self.prefill_s + part * (self.whole_s - self.prefill_s)
        return np.where(output_tokens < self.output_tokens, shortened_s, self.whole_s)
