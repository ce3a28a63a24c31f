"""Load that instances have said to have, and that nobody here had known of."""

from collections.abc import Iterator

import msgspec

from controlplane.model.fleet import Fleet
from controlplane.model.queue_belief import PresentLoad
from mesh.invariants import invariants


class UnseenLoad(msgspec.Struct, frozen=True):
    """What an instance has beyond its last report and all that was placed there since, as far as it is known."""

    instance_id: str
    requests: int
    prefill_tokens: int
    said_s: float
    fleet: Fleet
    """Where it counts as not reported yet."""


class UnseenLoads:
    """The last of each instance, oldest first, until its next report or by age; it counts in its fleet meanwhile."""

    def __init__(self) -> None:
        self._loads: dict[str, UnseenLoad] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[UnseenLoad]:
        return iter(self._loads.values())

    def correct(self, fleet: Fleet, instance_id: str, present: PresentLoad, now_s: float) -> None:
        """From now on the instance is believed to have at least what it says."""
        self.reported(instance_id)
        requests, tokens = fleet.believed(instance_id)
        more_requests, more_tokens = max(0, present.requests - requests), max(0, present.queued_prefill_tokens - tokens)
        self._loads[instance_id] = UnseenLoad(instance_id, more_requests, more_tokens, now_s, fleet)
        fleet.add_unreported(instance_id, more_requests, more_tokens)

    def reported(self, instance_id: str) -> None:
        """The instance has told anew what it has."""
        if self._loads:
            load = self._loads.pop(instance_id, None)
            if load is not None:
                load.fleet.add_unreported(instance_id, -load.requests, -load.prefill_tokens)

    def lost(self, instance_id: str) -> None:
        """The instance is gone, and with it its row."""
        self._loads.pop(instance_id, None)

    def close_older(self, said_before_s: float) -> None:
        """Close what was said before that moment: the instance reports to nobody."""
        for load in list(self):
            if load.said_s < said_before_s:
                self.reported(load.instance_id)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert all(name == load.instance_id for name, load in self._loads.items()), "each by its own instance"
        assert all(min(load.requests, load.prefill_tokens) >= 0 for load in self), "nothing is negative"
