"""A step as an instance plans it, and its result."""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import KvBlocks
from controlplane.model.request import TokenDelta
from simulator.cost.model import PrefillChunk
from simulator.instance.sequence import Sequence


class ScheduledChunk(msgspec.Struct, frozen=True, eq=False):
    """The part of one request's prompt that a step computes."""

    sequence: Sequence
    request_id: str
    shape: PrefillChunk


@dataclass(slots=True, eq=False)
class DecodeRun:
    """Consecutive steps that decode the same requests, the first `done` of which are over and counted."""

    durations_ms: NDArray[np.float64]
    """Shape (steps,)."""
    ends_ms: list[float]
    done: int = 0
    seen: int = 0
    """Steps that `load` tells of, counted or not: see `SimulatedInstance.glance`."""
    timed: int = 0
    """Steps whose durations were told, counted or not."""
    growth: tuple[int, ...] | None = None
    """Blocks that the first 0, 1, 2 ... steps after `done` need, up to one period; None: nobody has asked."""
    is_quiet: bool | None = None
    """See `SimulatedInstance.is_run_quiet`; None: nobody has asked."""

    def rest_of_one_step(self) -> "DecodeRun":
        """Only the step under way."""
        return DecodeRun(self.durations_ms[self.done : self.done + 1], self.ends_ms[self.done : self.done + 1])


class Step(msgspec.Struct, frozen=True, eq=False):
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
    run: DecodeRun | None = None
    """Where it stands for several steps."""

    @property
    def duration_ms(self) -> float:
        return self.ends_ms - self.started_ms

    @property
    def steps_left(self) -> int:
        """Steps that are not over and counted."""
        return self.steps if self.run is None else self.steps - self.run.done

    def interrupted(self) -> "Step":
        """A run that ends with the step under way."""
        if self.run is None:
            return self
        started_ms = self.run.ends_ms[self.run.done - 1] if self.run.done else self.started_ms
        run = self.run.rest_of_one_step()
        last_ms = float(run.durations_ms[0])
        return Step(started_ms, run.ends_ms[0], 1, last_ms, self.chunks, self.decode_requests, self.preempted, run)


class StartedRequest(msgspec.Struct, frozen=True):
    """A request whose first token came out."""

    request_id: str
    cached_prompt_tokens: int
    """Prompt tokens that it found in the prefix cache."""


class StepResult(msgspec.Struct, frozen=True):
    """Everything that a step changed: deltas, starts and KV changes."""

    emitted_tokens: int
    started: tuple[StartedRequest, ...]
    finished: tuple[str, ...]
    preempted: tuple[str, ...]
    kv_blocks: KvBlocks
    deltas: tuple[TokenDelta, ...]
    """For requests submitted with token ids; counted requests have none."""
