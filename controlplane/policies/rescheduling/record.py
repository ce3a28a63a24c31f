"""The rescheduler as the mesh has it configured: schedulers decide by it, workers report for it."""

from typing import Final

import msgspec

from controlplane.policies.parameters import checked
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from mesh.errors import ConfigurationError

RESCHEDULER_KEY = "/penstock/config/rescheduler"


class ReschedulerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What stands at the key, as JSON."""

    mode: str
    parameters: dict[str, float] = {}
    """Those that are missing take their defaults."""

    def read(self) -> tuple[ReschedulerMode, ReschedulerParameters]:
        """Raises `ConfigurationError` for a mode or a parameter that there is not, and for a value out of bounds."""
        try:
            mode = ReschedulerMode(self.mode)
        except ValueError:
            known = ", ".join(ReschedulerMode)
            raise ConfigurationError(f"there is no rescheduler mode {self.mode!r}; choose one of: {known}") from None
        return mode, checked(ReschedulerParameters, "rescheduler", self.parameters)


UNSET_RESCHEDULER: Final = ReschedulerRecord(ReschedulerMode.OFF)
"""What holds while nothing stands at the key."""
