"""Whose request is served next where several tenants wait (pure).

Start-time fair queuing (Goyal, Vin, Cheng, "Start-time Fair Queueing", 1996) over tokens as "Fairness in Serving Large
Language Models" (Sheng et al., OSDI 2024) counts them: a request starts, in virtual time, where its tenant's last one
ended or where service is now, whichever is later, and takes as long as it has tokens, over its tenant's share. Requests
are served by their starts. Who asks for more than the others waits behind his own requests only. Who was idle has no
more credit than `BURST_TOKENS`, which everybody has. Unlike the paper's counters, starts do not change while a request
waits: an engine can be given them as priorities.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from controlplane.model.request import MAX_TURN, Tenant
from mesh.invariants import invariants

GENERATED_WEIGHT: Final = 2.0
"""Of a generated token, where one of the prompt weighs 1 (Sheng et al., section 5.1)."""
TURN_TOKENS: Final = 64
"""Starts that are nearer to each other are one turn, so that turns of months of service fit into an integer."""
BURST_TOKENS: Final = 16_384
"""A tenant may be ahead of its share by so many, so that one which asks for less than its share on average does not
wait behind its own bursts: at 0.8 of a share that takes a fifth of P95 TTFT away, and half where steps are short."""
_SPARE_TENANTS: Final = 64


@dataclass(slots=True)
class _Entered:
    tenant: Tenant
    start: float
    has_begun: bool = False


class FairShare:
    """The virtual time of one queue. Every request that enters must leave; all tokens are weighted ones."""

    def __init__(self) -> None:
        self._now = 0.0
        """The latest start among those that have begun."""
        self._ends: dict[str, float] = {}
        """Where each tenant's next request starts, if it comes at once. Those before now are as if there were none."""
        self._requests: dict[Hashable, _Entered] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, request: Hashable, tenant: Tenant, tokens: float) -> float:
        """A request of so many tokens comes; returns its start. One that is known begins its account anew."""
        self._requests.pop(request, None)
        end = max(self._now, self._ends.get(tenant.name, 0.0))
        start = max(self._now, end - BURST_TOKENS / tenant.share)
        self._ends[tenant.name] = end + tokens / tenant.share
        self._requests[request] = _Entered(tenant, start)
        if len(self._ends) > 2 * len(self._requests) + _SPARE_TENANTS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        return start

    def begin(self, request: Hashable) -> None:
        """The request is being served. Unknown ones, and those that have begun before, change nothing."""
        found = self._requests.get(request)
        if found is not None and not found.has_begun:
            found.has_begun = True
            self._now = max(self._now, found.start)

    def charge(self, request: Hashable, tokens: float) -> None:
        """The request takes so many tokens more; below 0: less than was thought. Unknown ones are free."""
        found = self._requests.get(request)
        if found is not None:
            name, share = found.tenant.name, found.tenant.share
            self._ends[name] = self._ends.get(name, self._now) + tokens / share

    def leave(self, request: Hashable) -> None:
        """The request has ended, or goes on elsewhere. With the last one all accounts are closed."""
        self._requests.pop(request, None)
        if not self._requests:
            self._ends.clear()
            self._now = 0.0

    @invariants
    def validate(self) -> None:
        """Check what must hold between two calls. Raises `InvariantBroken`."""
        assert self._requests or (not self._ends and self._now == 0.0), "an empty queue owes nobody anything"
        for entered in self._requests.values():
            assert not entered.has_begun or entered.start <= self._now, "time is the latest start of what has begun"
        assert len(self._ends) <= 2 * len(self._requests) + _SPARE_TENANTS + 1


def turn_of(start: float) -> int:
    """A start as engines compare it, among requests of one priority."""
    return min(MAX_TURN, int(start / TURN_TOKENS))
