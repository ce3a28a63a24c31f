"""What moves requests in a simulation: the option and what it means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.policies.parameters import checked
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from mesh.errors import ConfigurationError
from services.cli.simulation.assignments import parse_assignments
from simulator.rescheduling.controller import ReschedulingController
from simulator.rescheduling.remaining_lengths import Every, Figure7Errors, Oracle, RemainingLengths

ORACLE: Final = "oracle"
PREDICTED_EVERY_TOKENS: Final = 20


@dataclass(frozen=True, slots=True)
class ReschedulerChoice:
    """A mode, `oracle` among them, and what differs from the parameters' defaults."""

    mode: str
    parameters: Mapping[str, float]

    @staticmethod
    def parse(text: str) -> "ReschedulerChoice":
        """MODE or MODE:PARAMETER=VALUE,... Raises `ConfigurationError`, for unknown names too."""
        mode, parameters = parse_assignments("rescheduler", text)
        if mode not in (*ReschedulerMode, ORACLE):
            known = ", ".join((*ReschedulerMode, ORACLE))
            raise ConfigurationError(f"there is no rescheduler mode {mode!r}; choose one of: {known}")
        checked(ReschedulerParameters, "rescheduler", parameters)
        return ReschedulerChoice(mode, parameters)

    def controllers(self, seed: int) -> tuple[ReschedulingController, ...]:
        """To be attached to the simulation: one, or none where nothing is moved."""
        if self.mode == ReschedulerMode.OFF:
            return ()
        parameters = checked(ReschedulerParameters, "rescheduler", self.parameters)
        if self.mode == ReschedulerMode.CURRENT:
            return (ReschedulingController(ReschedulerMode.CURRENT, parameters),)
        lengths: RemainingLengths = Oracle() if self.mode == ORACLE else Figure7Errors(seed)
        lengths = Every(lengths, PREDICTED_EVERY_TOKENS)
        mode = ReschedulerMode.PREDICTED if self.mode == ORACLE else ReschedulerMode(self.mode)
        return (ReschedulingController(mode, parameters, lengths),)
