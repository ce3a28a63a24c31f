"""Requests that load reports count, so that one that ends can be taken out before the next report.

A report is up to its interval old. By it the instance of an agent that has its answer, and asks again at once, is busy
with the request before: the next one would go elsewhere, away from its prefix.
"""

from collections.abc import Iterable, Mapping

import msgspec

from mesh.invariants import invariants


class CountedRequest(msgspec.Struct, frozen=True):
    """One that has ended although the last report of its instance counts it."""

    instance_id: str
    prefill_tokens: int
    """How much of its prompt the report may still count as to be computed."""


class CountedRequests:
    """The instance that counts each request: the last one that has reported it as admitted, and not as ended.

    At most `max_requests`; beyond, the oldest are forgotten, and taken out by the next report of their instance.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._where: dict[str, str] = {}
        """Instance by request, in the order of admission."""
        self._fresh: dict[str, Mapping[str, int]] = {}
        """By instance: the requests that its last report has admitted, with the prompt tokens that each was to have
        computed. What is left of them later is not known by request."""

    def __len__(self) -> int:
        return len(self._where)

    def reported(self, instance_id: str, admitted: Mapping[str, int], ended: Iterable[str]) -> None:
        """A report counts the requests of `admitted` from now on, with prompt tokens to be computed for each, and those
        that have `ended` no more."""
        where = self._where
        self._fresh[instance_id] = admitted
        for request_id in admitted:
            where.pop(request_id, None)
            where[request_id] = instance_id
        for request_id in ended:
            if where.get(request_id) == instance_id:
                del where[request_id]
        while len(where) > self._max_requests:
            del where[next(iter(where))]

    def ended(self, request_id: str, instance_id: str | None = None) -> CountedRequest | None:
        """The request is over (there, where an instance is named). None if no report counts it."""
        where = self._where.get(request_id)
        if where is None or instance_id not in (None, where):
            return None
        del self._where[request_id]
        return CountedRequest(where, self._fresh[where].get(request_id, 0))

    def adopt(self, source: "CountedRequests", instance_id: str) -> None:
        """Take over what another table knows of the instance's last report."""
        self.reported(instance_id, {each: 0 for each, where in source._where.items() if where == instance_id}, ())
        self._fresh[instance_id] = source._fresh.get(instance_id, {})

    def lost(self, instance_id: str) -> None:
        """The instance is gone, and with it its report."""
        self._fresh.pop(instance_id, None)
        for request_id in [each for each, where in self._where.items() if where == instance_id]:
            del self._where[request_id]

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(self._where) <= self._max_requests, "what is remembered is bounded"
        assert set(self._where.values()) <= self._fresh.keys(), "who counts a request has reported"
