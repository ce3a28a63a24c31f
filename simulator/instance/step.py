"""What an instance plans for a step, and what came of it."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import KvBlocks
from controlplane.model.request import TokenDelta
from mesh.errors import IllegalTransition
from simulator.cost.model import PrefillChunk
from simulator.instance.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The part of one request's prompt that a step computes."""

    sequence: Sequence = field(repr=False)
    request_id: str
    shape: PrefillChunk


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRun:
    """Consecutive steps that decode the same requests. Both arrays have the shape (steps,)."""

    durations_ms: NDArray[np.float64]
    ends_ms: NDArray[np.float64]


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
    run: "DecodeRun | None" = None
    """Where it stands for several steps."""

    @property
    def duration_ms(self) -> float:
        """From start to end."""
        return self.ends_ms - self.started_ms

    def after(self, steps: int) -> "Step":
        """What is left of a run when its first `steps`, but not all, are over."""
        run = self._run()
        rest = DecodeRun(run.durations_ms[steps:], run.ends_ms[steps:])
        return replace(self, started_ms=float(run.ends_ms[steps - 1]), steps=self.steps - steps, run=rest)

    def only_the_first(self) -> "Step":
        """A run cut short after its first step."""
        run = self._run()
        first = DecodeRun(run.durations_ms[:1], run.ends_ms[:1])
        ends_ms, step_ms = float(run.ends_ms[0]), float(run.durations_ms[0])
        return replace(self, ends_ms=ends_ms, steps=1, last_step_ms=step_ms, run=first)

    def _run(self) -> DecodeRun:
        if self.run is None:
            raise IllegalTransition(f"{self} is a single step: it cannot be divided")
        return self.run


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
