"""Stages: which instances serve which range of lengths (CascadeInfer, section 3.1)."""

from bisect import bisect_left
from itertools import pairwise

import msgspec

from mesh.errors import ConfigurationError


class StagePlan(msgspec.Struct, frozen=True):
    """Stages by ascending length: how many instances each has, and where one ends and the next begins."""

    instances: tuple[int, ...]
    """Number of instances of each stage; at least 1."""
    boundaries_tokens: tuple[int, ...]
    """The longest sequence that each stage serves, strictly ascending; the last stage has no bound."""
    quality: float = 0.0
    """Predicted for the population that it was made for: normalised latency in ms per token, summed over the requests
    in flight, transfers included; lower is better."""

    def __post_init__(self) -> None:
        if not self.instances or len(self.boundaries_tokens) != len(self.instances) - 1:
            raise ConfigurationError(
                f"a plan of {len(self.instances)} stages has one boundary less, got {self.boundaries_tokens}"
            )
        if min(self.instances) < 1 or any(b <= a for a, b in pairwise((0, *self.boundaries_tokens))):
            raise ConfigurationError(
                f"every stage needs an instance and the boundaries must ascend from above 0, got {self}"
            )

    @property
    def stages(self) -> int:
        return len(self.instances)

    def stage_of(self, length_tokens: int) -> int:
        """The earliest stage whose range covers this length."""
        return bisect_left(self.boundaries_tokens, length_tokens)
