"""What of a decode batch's lengths its attention depends on, for one step or for each of a run of them.

The same arithmetic serves both: on plain numbers for a step, on arrays with an entry a step for a run. Sums, maxima
and squares are exact integers and the rest is elementwise, so a run gives bit for bit what its steps give one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = Any
"""An int or a float, or an array of them; which one is the same within a call."""

MINIMUM: dict[bool, Callable[[Numbers, Numbers], Numbers]] = {False: min, True: np.minimum}
MAXIMUM: dict[bool, Callable[[Numbers, Numbers], Numbers]] = {False: max, True: np.maximum}


@dataclass(frozen=True, slots=True, eq=False)
class DecodeLengths:
    """Of at least one request."""

    requests: int
    total: Numbers
    """Sum of the contexts."""
    longest: Numbers
    squares: Numbers
    """Sum of the squared contexts."""
    is_run: bool
    """Arrays rather than plain numbers."""

    @staticmethod
    def of_step(contexts: NDArray[np.int64], total: int) -> "DecodeLengths":
        """The lengths of one step's decodes, at least one; `total` is the sum of `contexts`."""
        return DecodeLengths(len(contexts), total, int(np.maximum.reduce(contexts)), int(contexts @ contexts), False)

    def run(self, steps: int) -> "DecodeLengths":
        """Of a run of steps that starts with this one; each adds a token to every context."""
        grown = np.arange(steps, dtype=np.int64)
        return DecodeLengths(
            self.requests,
            self.total + self.requests * grown,
            self.longest + grown,
            self.squares + 2 * self.total * grown + self.requests * grown * grown,
            True,
        )

    def levelled(self) -> "DecodeLengths":
        """A batch of the same size and total in which all are equally long."""
        longest = -(-self.total // self.requests)
        return DecodeLengths(self.requests, self.total, longest, self.requests * longest * longest, self.is_run)
