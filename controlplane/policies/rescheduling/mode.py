"""What the rescheduler goes by."""

from enum import StrEnum


class ReschedulerMode(StrEnum):
    """Chosen by the operator, or forced by what is known (see `effective_mode`)."""

    OFF = "off"
    """Nothing is moved."""
    CURRENT = "current"
    """The load of this moment: STAR without prediction."""
    PREDICTED = "predicted"
    """The load of this moment and of the horizon, by predicted remaining lengths."""
