"""The cascades in force, and how long their tiers take."""

import logging
from collections.abc import Mapping

from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder

log = logging.getLogger(__name__)

_SMOOTHING = 0.1
"""Weight of the newest answer in a tier's expected time."""


class TierTimes:
    """What an answer takes on each model, judging included: a moving mean, of which deadlines are kept by."""

    def __init__(self) -> None:
        self._mean_s: dict[str, float] = {}

    def took(self, model: str, seconds: float) -> None:
        """Another answer."""
        before_s = self._mean_s.get(model, seconds)
        self._mean_s[model] = before_s + _SMOOTHING * (seconds - before_s)

    def expected_s(self, record: CascadeRecord) -> tuple[float, ...]:
        """For each tier: as configured, else as measured; 0 where nothing is known."""
        return record.expected_s or tuple(self._mean_s.get(model, 0.0) for model in record.tiers)


class Cascades:
    """Follows the state store."""

    def __init__(self, store: StateStore) -> None:
        self.times = TierTimes()
        self._folder = StoredFolder(store, CASCADES_PREFIX, CascadeRecord, CascadeRecord.checked, self._on_change)

    @property
    def records(self) -> Mapping[str, CascadeRecord]:
        """By the name that clients ask for."""
        return self._folder.records

    async def follow(self) -> None:
        """For ever."""
        await self._folder.follow()

    def _on_change(self, name: str, record: CascadeRecord | None) -> None:
        log.info("cascade changed", extra={"cascade": name, "record": str(record)})
