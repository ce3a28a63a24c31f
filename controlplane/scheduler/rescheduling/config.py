"""The rescheduler as the mesh has it configured: a key in the state store that schedulers and workers follow."""

import logging
from collections.abc import Mapping

from controlplane.policies.rescheduling.record import RESCHEDULER_KEY, ReschedulerRecord
from controlplane.scheduler.rescheduling.service import ReschedulingService
from mesh.store.interface import StateStore
from mesh.store.stored_setting import StoredSetting

log = logging.getLogger(__name__)


class ReschedulerConfig:
    """Keeps this scheduler at what the store says, and writes there what operators ask for."""

    def __init__(self, store: StateStore, service: ReschedulingService) -> None:
        self._service = service
        switch = service.manager.switch
        default = ReschedulerRecord(switch.mode, switch.parameters.values())
        self._setting = StoredSetting(store, RESCHEDULER_KEY, ReschedulerRecord, default, self._apply)

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
        if self._service.configure(*record.read()):
            log.warning(
                "rescheduler switched",
                extra={"mode": record.mode, "parameters": record.parameters, "revision": revision},
            )
