"""The cascades that clients may ask for, as the state store has them now."""

import logging
from collections.abc import Mapping

from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from controlplane.protocols.cascade.escalation_odds import EscalationOdds
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder
from services.frontend.cascade.latency_estimates import TierLatencyEstimates

log = logging.getLogger(__name__)


class Cascades:
    """The records of all cascades, kept at what the state store says; serve what is known while it is away."""

    def __init__(self, store: StateStore) -> None:
        self.latencies = TierLatencyEstimates()
        """Of the tiers of all cascades, which may share models."""
        self._odds: dict[tuple[str, int], EscalationOdds] = {}
        self._folder = StoredFolder(store, CASCADES_PREFIX, CascadeRecord, CascadeRecord.checked, self._on_change)

    @property
    def records(self) -> Mapping[str, CascadeRecord]:
        """By the name that clients ask for."""
        return self._folder.records

    def odds(self, name: str, tier: int) -> EscalationOdds:
        """Of answers of this tier, under the thresholds and judges in force."""
        return self._odds.setdefault((name, tier), EscalationOdds())

    async def follow(self) -> None:
        """Keep the records current, until cancelled."""
        await self._folder.follow()

    def _on_change(self, name: str, record: CascadeRecord | None) -> None:
        self._odds = {key: odds for key, odds in self._odds.items() if key[0] != name}
        log.info("cascade changed", extra={"cascade": name, "record": str(record)})
