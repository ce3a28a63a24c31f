"""The option --tier: [NAME=]MODEL@DEVICE[:DTYPE], or NAME=profile:FILE[,FILE...]."""

from pathlib import Path

import click

from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import ConfigurationError
from services.cli.profiling.profile_file import read_profile
from simulator.cascade.make_plan import parse_tier, profile_keys
from simulator.cascade.tier import Tier


def _profiles_in(text: str) -> dict[str, InstanceProfile]:
    """The profiles in the files that `profile:FILE[,FILE...]` names. Raises `ConfigurationError`."""
    return {path: read_profile(Path(path)) for path in profile_keys(text)}


def named_tier(text: str, gpus: int) -> tuple[str, Tier]:
    """(name, model on its device), in replicas of at most `gpus`. Raises `click.BadParameter`."""
    name, equals, rest = text.partition("=")
    if not equals:
        name, rest = "", text
    try:
        tier = parse_tier(rest, gpus, _profiles_in(rest))
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="--tier") from error
    return name or rest.partition("@")[0], tier
