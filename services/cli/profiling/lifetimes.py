"""The batches that each request ran in, on average over its lifetime. Pure; times are arguments."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.qoe import BatchLoad, QoeSample

Features = NDArray[np.float64]


@dataclass(slots=True)
class _InFlight:
    prompt_tokens: int
    submitted_ms: float
    integral_before: Features
    first_token_ms: float = 0.0
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The samples that one finished request gives: the mean batch it ran in with its latency a token, and its TTFT."""

    qoe: QoeSample
    prompt_tokens: int
    ttft_ms: float


class Lifetimes:
    """Integrates n, sum I, sum I^2 and sum L of the requests in flight over time."""

    def __init__(self) -> None:
        self._in_flight: dict[str, _InFlight] = {}
        self._features = np.zeros(4)
        self._integral = np.zeros(4)
        self._now_ms = 0.0

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the requests in flight."""
        return tuple(self._in_flight)

    def submitted(self, request_id: str, prompt_tokens: int, now_ms: float) -> None:
        """A request with a prompt of this length joins the batch. Times must not go back between calls."""
        self._advance(now_ms)
        self._in_flight[request_id] = _InFlight(prompt_tokens, now_ms, self._integral.copy())
        self._features += (1, prompt_tokens, prompt_tokens**2, prompt_tokens)

    def produced(self, request_id: str, tokens: int, now_ms: float) -> None:
        """The request has generated `tokens` more tokens."""
        self._advance(now_ms)
        request = self._in_flight[request_id]
        if not request.answer_tokens:
            request.first_token_ms = now_ms
        request.answer_tokens += tokens
        self._features[3] += tokens

    def ended(self, request_id: str, now_ms: float) -> FinishedRequest | None:
        """The request leaves the batch. Returns its sample; None if it generated nothing."""
        self._advance(now_ms)
        request = self._in_flight.pop(request_id)
        self._features -= (
            1,
            request.prompt_tokens,
            request.prompt_tokens**2,
            request.prompt_tokens + request.answer_tokens,
        )
        lived_ms = now_ms - request.submitted_ms
        if not request.answer_tokens or lived_ms <= 0:
            return None
        load = BatchLoad(*((self._integral - request.integral_before) / lived_ms).tolist())
        return FinishedRequest(
            QoeSample(load, lived_ms / request.answer_tokens),
            request.prompt_tokens,
            request.first_token_ms - request.submitted_ms,
        )

    def _advance(self, now_ms: float) -> None:
        self._integral += self._features * (now_ms - self._now_ms)
        self._now_ms = now_ms
