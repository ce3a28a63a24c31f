"""The rescheduler as the mesh has it configured: a key in the state store that schedulers and workers follow."""

import logging
from collections.abc import Mapping

from controlplane.policies.rescheduling.parameters import ReschedulerMode
from controlplane.policies.rescheduling.record import RESCHEDULER_KEY, UNSET_RESCHEDULER, ReschedulerRecord
from controlplane.scheduler.rescheduling.service import ReschedulingService
from mesh.store.interface import StateStore
from mesh.store.stored_setting import StoredSetting

log = logging.getLogger(__name__)


class ReschedulerConfig:
    """Keeps this scheduler at what the store says, and writes there what operators ask for."""

    def __init__(self, store: StateStore, service: ReschedulingService, started_with: ReschedulerMode) -> None:
        """`started_with` becomes the mesh's mode, known to workers as well, where the store names none."""
        self._service = service
        self._started_with = started_with
        self._is_told = False
        first = None if started_with is ReschedulerMode.OFF else ReschedulerRecord(started_with)
        self._setting = StoredSetting(store, RESCHEDULER_KEY, ReschedulerRecord, UNSET_RESCHEDULER, self._apply, first)

    async def set(self, mode: str, parameters: Mapping[str, float]) -> None:
        """Switch the mesh; returns when this scheduler has. Raises `ConfigurationError` for a mode or parameters that
        there are not, `StoreError` and `DeadlineExceeded`. Every parameter is stored, defaults included."""
        checked_mode, checked = ReschedulerRecord(mode, dict(parameters)).read()
        await self._setting.put(ReschedulerRecord(checked_mode, checked.values()))

    async def follow(self) -> None:
        """Apply what the store says, for ever."""
        await self._setting.follow()

    def _apply(self, record: ReschedulerRecord, revision: int) -> None:
        """Configure the service as stored. Raises `ConfigurationError` for a mode or parameter that there is not."""
        mode, parameters = record.read()
        if record is not UNSET_RESCHEDULER and not self._is_told:
            self._is_told = True
            if self._started_with not in (ReschedulerMode.OFF, mode):
                log.warning(
                    "--rescheduler is not followed: the state store names another mode, which `penstock rescheduler` "
                    "changes",
                    extra={"mode": mode, "started_with": self._started_with},
                )
        if self._service.configure(mode, parameters):
            log.warning(
                "rescheduler switched",
                extra={"mode": record.mode, "parameters": record.parameters, "revision": revision},
            )
