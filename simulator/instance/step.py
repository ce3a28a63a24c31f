"""What an instance plans for a step, and what came of it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import KvBlocks
from controlplane.model.request import TokenDelta
from simulator.cost.model import PrefillChunk
from simulator.instance.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The part of one request's prompt that a step computes."""

    sequence: Sequence = field(repr=False)
    request_id: str
    shape: PrefillChunk


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One engine step, or several that differ in nothing but the contexts' growth."""

    started_ms: float
    ends_ms: float
    steps: int
    last_step_ms: float
    """Duration of the last of `steps`."""
    chunks: tuple[ScheduledChunk, ...]
    decode_requests: int
    preempted: tuple[str, ...] = ()
    """Requests that lost their blocks and wait again."""
    each_ends_ms: NDArray[np.float64] | None = None
    """When each of several steps ends."""

    @property
    def duration_ms(self) -> float:
        """From start to end."""
        return self.ends_ms - self.started_ms


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request whose first token came out."""

    request_id: str
    cached_prompt_tokens: int
    """Prompt tokens that it found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """All that a step changed, for whoever watches the instance."""

    emitted_tokens: int
    started: tuple[StartedRequest, ...]
    finished: tuple[str, ...]
    preempted: tuple[str, ...]
    kv_blocks: KvBlocks
    deltas: tuple[TokenDelta, ...]
    """For requests submitted with token ids; counted requests have none."""
