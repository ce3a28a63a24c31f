"""NAME:PARAMETER=NUMBER,... as options write it."""

from collections.abc import Sequence

from mesh.errors import ConfigurationError


def parse_assignments(kind: str, text: str, settings: Sequence[str] = ()) -> tuple[str, dict[str, float]]:
    """Name and parameters; `settings` are further PARAMETER=NUMBER. Raises `ConfigurationError`, which calls the thing
    a `kind`."""
    name, _, assignments = text.partition(":")
    parameters: dict[str, float] = {}
    for assignment in (*filter(None, assignments.split(",")), *settings):
        parameter, _, value = assignment.partition("=")
        try:
            parameters[parameter] = float(value)
        except ValueError as error:
            raise ConfigurationError(f"{kind} {text!r}: {assignment!r} is not of the form PARAMETER=NUMBER") from error
    return name, parameters
