"""The schedulers of a simulation, each with a table and a policy of its own, and what they hear of each other."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import msgspec
import numpy as np

from controlplane.model.cluster import ClusterTable
from controlplane.model.placement import Placement
from controlplane.model.shared_event import SharedEvent, SharedKind
from controlplane.policies.interface import Policy
from controlplane.policies.place import shared_events
from simulator.cluster.config import ClusterConfig
from simulator.cluster.events import EventQueue, Rank

_STREAM = 0x5C4ED
"""Of random numbers: which scheduler places a request."""


@dataclass(frozen=True, slots=True, eq=False)
class Scheduler:
    """Places the requests of some frontends."""

    table: ClusterTable
    policy: Policy


class Schedulers:
    """A request is placed by one of them, drawn at its arrival; the others count the placement `share_ms` later, or
    when its instance reports it."""

    def __init__(
        self, config: ClusterConfig, policy: Policy, tables: Sequence[ClusterTable], events: EventQueue
    ) -> None:
        """Each begins with the policy as it is."""
        self._all = [Scheduler(table, deepcopy(policy) if rank else policy) for rank, table in enumerate(tables)]
        self._share_ms = config.schedulers.share_ms
        self._events = events
        self._rng = np.random.default_rng((config.seed, _STREAM))
        self._of: dict[str, Scheduler] = {}
        """Of each open request, where there are several."""

    @property
    def policies(self) -> list[Policy]:
        """One for each table."""
        return [each.policy for each in self._all]

    def of(self, request_id: str) -> Scheduler:
        """Who places an open request."""
        if len(self._all) == 1:
            return self._all[0]
        known = self._of.get(request_id)
        if known is None:
            known = self._of[request_id] = self._all[int(self._rng.integers(len(self._all)))]
        return known

    def placed(self, placement: Placement) -> None:
        """Let the others count it."""
        for event in shared_events(placement):
            self.share(event)

    def ended(self, request_id: str) -> None:
        """The request is over: it counts nowhere."""
        for instance_id in self.of(request_id).table.ended(request_id):
            self.share(SharedEvent(SharedKind.ENDED, request_id, instance_id))
        self._of.pop(request_id, None)

    def share(self, event: SharedEvent) -> None:
        """What one scheduler tells the others of a request of its own."""
        share_ms = self._share_ms
        if share_ms is None or len(self._all) == 1:
            return
        own = self.of(event.request_id)
        event = msgspec.structs.replace(event, origin="another")
        self._events.at(self._events.now_ms + share_ms, Rank.MESSAGE, self._deliver(own, event), background=True)

    def _deliver(self, sender: Scheduler, event: SharedEvent) -> Callable[[float], None]:
        def deliver(now_ms: float) -> None:
            for each in self._all:
                if each is not sender:
                    each.table.shared(event, now_ms / 1000)

        return deliver
