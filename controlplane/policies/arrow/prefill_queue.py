"""The prompts that wait on one instance, by its scheduler's own placements (Arrow, section 4.2 and equation 1)."""

from collections import deque
from dataclasses import dataclass
from math import isclose

from controlplane.prediction.ttft import TtftCurve
from mesh.invariants import invariants

MAX_ENTRIES = 16_384
"""More prompts than that are not remembered one by one; their tokens still count."""


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt that was placed on the instance."""

    new_tokens: int
    cached_tokens: int
    prefill_ms: float
    """Predicted, for all of it."""


class PrefillQueue:
    """Prompts in the order in which they were placed, which is the order in which instances compute them.

    The instance says only how many prompt tokens it has yet to compute; those are the last ones of this queue.
    """

    def __init__(self, curve: TtftCurve) -> None:
        self.curve = curve
        self._prompts: deque[QueuedPrompt] = deque()
        self._tokens = 0
        self._prefill_ms = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, new_tokens: int, cached_tokens: int) -> None:
        """A prompt was placed on the instance."""
        if len(self._prompts) == MAX_ENTRIES:
            self._drop_first()
        prompt = QueuedPrompt(new_tokens, cached_tokens, self.curve.prefill_ms(new_tokens, cached_tokens))
        self._prompts.append(prompt)
        self._tokens += new_tokens
        self._prefill_ms += prompt.prefill_ms

    def delay_ms(self, pending_tokens: int) -> float:
        """Predicted time until `pending_tokens`, all that the instance has yet to compute, are computed.

        The sum of the predicted times of the prompts queued, minus what has run. Tokens that this queue does not know
        of (placed by someone else, or to be computed again after a preemption) count as a prompt of their own.
        """
        while self._prompts and self._tokens - self._prompts[0].new_tokens >= pending_tokens:
            self._drop_first()
        if not self._prompts:
            self._tokens, self._prefill_ms = 0, 0.0  # whatever rounding has left
            return self.curve.prefill_ms(pending_tokens) if pending_tokens > 0 else 0.0
        if pending_tokens > self._tokens:
            return self._prefill_ms + self.curve.prefill_ms(pending_tokens - self._tokens)
        first = self._prompts[0]
        has_run_ms = self.curve.part_ms(self._tokens - pending_tokens, first.cached_tokens)
        return max(self._prefill_ms - has_run_ms, 0.0)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(self._prompts) <= MAX_ENTRIES, "the queue is bounded"
        if self._prompts:
            assert self._tokens == sum(prompt.new_tokens for prompt in self._prompts), "all prompts' tokens count"
            expected_ms = sum(prompt.prefill_ms for prompt in self._prompts)
            assert isclose(self._prefill_ms, expected_ms, rel_tol=1e-6, abs_tol=1e-3), f"{expected_ms} ms are queued"

    def _drop_first(self) -> None:
        first = self._prompts.popleft()
        self._tokens -= first.new_tokens
        self._prefill_ms -= first.prefill_ms
