"""Parameters of placement policies: named numbers with defaults and bounds."""

from collections.abc import Mapping
from math import isfinite
from typing import TypeVar

import msgspec

from mesh.errors import ConfigurationError


class PolicyParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What operators may set of a policy: int and float fields, each with a default and its bounds.

    This class itself is for policies that have none.
    """

    def values(self) -> dict[str, float]:
        """All of them, under the names that operators use."""
        values: dict[str, float] = msgspec.to_builtins(self)
        return values


Parameters = TypeVar("Parameters", bound=PolicyParameters)


def checked(kind: type[Parameters], policy: str, given: Mapping[str, float]) -> Parameters:
    """The given parameters, defaults for the others.

    Raises `ConfigurationError` for an unknown name or a value out of bounds. Whole numbers may come as floats,
    as they do over the wire.
    """
    infinite = [name for name, value in given.items() if not isfinite(value)]
    if infinite:
        raise ConfigurationError(f"{', '.join(infinite)} of the policy {policy!r} must be a finite number")
    whole = {name: int(value) if float(value).is_integer() else value for name, value in given.items()}
    try:
        return msgspec.convert(whole, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(f"{name}={value:g}" for name, value in kind().values().items()) or "none"
        raise ConfigurationError(
            f"the policy {policy!r}: {error}; its parameters and their defaults: {known}"
        ) from None
