"""The outcome of one request, with the times that its observer saw."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """Times are seconds on one monotonic clock whose zero is the start of the experiment.

    A failed request (`error` not empty) counts as an error and nowhere else.
    """

    arrival_s: float
    """When it was due, whether or not the client was late: latencies count from here, so that a client or an
    endpoint that stalls the arrivals cannot hide it (coordinated omission)."""
    finished_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    instance_id: str = ""
    """Where it ran; empty where the endpoint does not tell."""
    error: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """Arrival to first token; None where no token came."""
        return None if self.first_token_s is None else (self.first_token_s - self.arrival_s) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """(last token - first token) / (tokens - 1); None below two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) * 1000 / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        """End-to-end latency: from the arrival to the last token."""
        return (self.finished_s - self.arrival_s) * 1000
