"""The requests of a simulation from arrival to end: each ends exactly once."""

from dataclasses import dataclass

from mesh.errors import IllegalTransition
from simulator.instance.counted_request import CountedRequest
from simulator.report.outcome import RequestOutcome


@dataclass(slots=True)
class OpenRequest:
    """A request under way."""

    index: int
    """Its place in the trace."""
    arrival_s: float
    request: CountedRequest
    """As it would be submitted now: tokens emitted before a failure included."""
    instance_id: str = ""
    first_token_s: float | None = None
    cached_tokens: int = 0


class Ledger:
    """Open requests, and the outcomes of those that ended."""

    def __init__(self) -> None:
        self.open: dict[str, OpenRequest] = {}
        self._outcomes: dict[int, RequestOutcome] = {}
        self._ended: list[str] = []

    @property
    def ended(self) -> int:
        """How many requests have ended."""
        return len(self._outcomes)

    def outcomes(self) -> list[RequestOutcome]:
        """In the order of the trace. Raises `IllegalTransition` while requests are open."""
        if self.open:
            raise IllegalTransition(f"{len(self.open)} requests have not ended, {next(iter(self.open))} among them")
        return [self._outcomes[index] for index in sorted(self._outcomes)]

    def take_ended(self) -> list[str]:
        """Requests that finished since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def arrived(self, entry: OpenRequest) -> None:
        """A request comes in."""
        request_id = entry.request.request_id
        if request_id in self.open or entry.index in self._outcomes:
            raise IllegalTransition(f"request {request_id} has arrived before")
        self.open[request_id] = entry

    def started(self, request_id: str, cached_tokens: int, now_s: float) -> None:
        """A token came out after prefill; the first time it counts, not after a failure."""
        entry = self.open[request_id]
        if entry.first_token_s is None:
            entry.first_token_s = now_s
            entry.cached_tokens = cached_tokens

    def finished(self, request_id: str, now_s: float) -> None:
        """All its tokens are out."""
        self._close(request_id, now_s, "")
        self._ended.append(request_id)

    def failed(self, request_id: str, now_s: float, error: str) -> None:
        """Nobody will serve it."""
        self._close(request_id, now_s, error)

    def _close(self, request_id: str, now_s: float, error: str) -> None:
        entry = self.open.pop(request_id, None)
        if entry is None:
            raise IllegalTransition(f"request {request_id} ends, but it is not open: it never came or ended before")
        request = entry.request
        self._outcomes[entry.index] = RequestOutcome(
            arrival_s=entry.arrival_s,
            finished_s=now_s,
            first_token_s=entry.first_token_s,
            last_token_s=None if error else now_s,
            input_tokens=request.prompt_tokens,
            output_tokens=request.emitted_tokens if error else request.output_tokens,
            cached_tokens=entry.cached_tokens,
            instance_id=entry.instance_id,
            error=error,
        )
