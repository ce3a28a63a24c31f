"""Requests that were placed and that no load report counts yet."""

from collections.abc import Container, Iterator

import msgspec

from mesh.invariants import invariants


class UnreportedRequest(msgspec.Struct, frozen=True):
    """What a placement adds to an instance's load until the instance reports it itself: tokens to prefill there, or,
    in the ledger of decodes, tokens of context to come."""

    request_id: str
    model: str
    instance_id: str
    tokens: int
    placed_s: float
    origin: str = ""
    """The other scheduler that placed it; empty: this one."""


class UnreportedRequests:
    """Open placements by request id, oldest first, at most `max_requests` of them.

    One is closed by the report that admits it, by the request's end, by the instance's loss, or by age.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._open: dict[str, UnreportedRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[UnreportedRequest]:
        return iter(tuple(self._open.values()))

    def get(self, request_id: str) -> UnreportedRequest | None:
        """The placement of this request that no report counts yet; None if there is none."""
        return self._open.get(request_id)

    def add(self, request: UnreportedRequest) -> list[UnreportedRequest]:
        """Open a placement. Returns those that are thereby closed: an earlier placement of the same request,
        or the oldest one when there are too many."""
        closed = self.close(request.request_id)
        self._open[request.request_id] = request
        if len(self._open) > self._max_requests:
            closed += self.close(next(iter(self._open)))
        return closed

    def close(self, request_id: str, instance_id: str | None = None) -> list[UnreportedRequest]:
        """Close the request's placement, if it is open (and on that instance, where one is named)."""
        request = self._open.get(request_id)
        if request is None or (instance_id is not None and request.instance_id != instance_id):
            return []
        del self._open[request_id]
        return [request]

    def of(self, instance_id: str) -> list[UnreportedRequest]:
        """The open placements on an instance, oldest first."""
        return [request for request in self._open.values() if request.instance_id == instance_id]

    def close_instance(self, instance_id: str) -> None:
        """The instance is gone and takes its corrections with it."""
        for request in self.of(instance_id):
            del self._open[request.request_id]

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(self._open) <= self._max_requests, "open placements are bounded"
        assert all(request_id == request.request_id for request_id, request in self._open.items()), "each by its own id"

    def close_older(self, placed_before_s: float, kept: Container[str] = ()) -> list[UnreportedRequest]:
        """Close what was placed before that moment, but on the instances of `kept`."""
        closed = []
        for request in self._open.values():
            if request.placed_s >= placed_before_s:
                break
            if request.instance_id not in kept:
                closed.append(request)
        for request in closed:
            del self._open[request.request_id]
        return closed
