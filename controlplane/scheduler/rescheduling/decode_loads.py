"""What instances have told of their decoding requests, and when. No I/O, no clock."""

from collections.abc import Container
from dataclasses import dataclass

from controlplane.policies.rescheduling.decode_load import DecodeLoad


@dataclass(frozen=True, slots=True)
class HeardLoad:
    """The last report of one incarnation of an instance."""

    incarnation_id: str
    load: DecodeLoad
    heard_s: float


class DecodeLoads:
    """The last report of every instance. Soft state: whatever is here is at most as old as its `heard_s` says."""

    def __init__(self) -> None:
        self._heard: dict[str, HeardLoad] = {}

    def reported(self, instance_id: str, incarnation_id: str, load: DecodeLoad, now_s: float) -> None:
        """An instance has reported its decoding requests; replaces what it reported before."""
        self._heard[instance_id] = HeardLoad(incarnation_id, load, now_s)

    def lost(self, instance_id: str) -> None:
        """Forget the instance's report: it is gone, or its monitor hears of it no more."""
        self._heard.pop(instance_id, None)

    def keep(self, instance_ids: Container[str]) -> None:
        """These are all that there are."""
        self._heard = {each: heard for each, heard in self._heard.items() if each in instance_ids}

    def get(self, instance_id: str, incarnation_id: str) -> HeardLoad | None:
        """The last report of this incarnation; None if there was none."""
        heard = self._heard.get(instance_id)
        return heard if heard is not None and heard.incarnation_id == incarnation_id else None
