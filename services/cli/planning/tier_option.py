"""--tier [NAME=]MODEL@DEVICE[:DTYPE]."""

import click

from simulator.cascade.tier import MAX_REPLICA_GPUS, TierModel


def parse_tier(text: str, gpus: int) -> tuple[str, TierModel]:
    """(name, model on its device), in replicas of at most `gpus`.

    Raises `click.BadParameter`; whether the catalogue has model and device is found later.
    """
    name, equals, rest = text.partition("=")
    if not equals:
        name, rest = "", text
    model, at, where = rest.partition("@")
    device, _, dtype = where.partition(":")
    if not (model and at and device):
        raise click.BadParameter(f"{text!r} is not of the form [NAME=]MODEL@DEVICE[:DTYPE]", param_hint="--tier")
    return name or model, TierModel(model, device, dtype, max_gpus=min(gpus, MAX_REPLICA_GPUS))
