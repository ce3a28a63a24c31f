"""--tier [NAME=]MODEL@DEVICE[:DTYPE]."""

import click

from mesh.errors import ConfigurationError
from simulator.cascade.make_plan import parse_tier
from simulator.cascade.tier import Tier


def named_tier(text: str, gpus: int) -> tuple[str, Tier]:
    """(name, model on its device), in replicas of at most `gpus`. Raises `click.BadParameter`."""
    name, equals, rest = text.partition("=")
    if not equals:
        name, rest = "", text
    try:
        tier = parse_tier(rest, gpus)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="--tier") from error
    return name or rest.partition("@")[0], tier
