"""Options of `penstock up` that say on what its instances run."""

from collections.abc import Callable
from typing import Any

import click

from mesh.errors import ConfigurationError
from services.cli.carriers.carried import CARRIERS, CPU_IMAGE, GPU_IMAGE, PROCESSES, checked_carrier

Command = Callable[..., Any]


def _carrier(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """Raises `click.BadParameter`, which ends the command with status 2 before anything is started."""
    try:
        return checked_carrier(text)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from None


def carrier_options(command: Command) -> Command:
    """Add --on, as `carrier`, --image and --gpu-kind."""
    command = click.option(
        "--gpu-kind",
        metavar="NAME",
        default="",
        help="This machine's GPUs in `penstock autoscale set --kind gpu=NAME`; other kinds start elsewhere.",
    )(command)
    command = click.option(
        "--image",
        metavar="NAME",
        default="",
        help=f"With --on docker: of every instance. Default: {GPU_IMAGE} where there are GPUs, else {CPU_IMAGE}.",
    )(command)
    return click.option(
        "--on",
        "carrier",
        metavar=f"[{'|'.join(CARRIERS)}|ray://HOST:PORT]",
        callback=_carrier,
        default=PROCESSES,
        show_default=True,
        help="What instances run as, or on; everything else is a process of this machine (docs/deployment.md).",
    )(command)
