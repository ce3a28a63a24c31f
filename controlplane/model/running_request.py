"""A request in the middle of its decoding, as whoever moves requests sees it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request that an instance decodes; requests that wait or are still in prefill have no such value."""

    request_id: str
    context_tokens: int
    """Prompt and generated tokens: what its KV takes on the instance now, N(r) of STAR (section 5.2)."""
    generated_tokens: int
    remaining_tokens: int | None = None
    """Tokens that it is predicted still to generate from now on, at least 0; None where nobody predicts."""
    frontend_id: str = ""
    """The frontend that its tokens go to; empty where there are none, as in a simulation."""
    band_tokens: tuple[int, int] | None = None
    """With a probability of 10 and of 90 % as many or fewer remain; None where nobody says so."""

    def __post_init__(self) -> None:
        if not 0 <= self.generated_tokens <= self.context_tokens:
            raise ValueError(f"{self}: a request generates between 0 and all of its context tokens")
        if self.remaining_tokens is not None and self.remaining_tokens < 0:
            raise ValueError(f"{self}: remaining_tokens cannot be negative; say None where nothing is predicted")
