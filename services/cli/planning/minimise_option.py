"""--minimise, and what --latency-s means with it."""

from collections.abc import Callable
from typing import Any

import click

from controlplane.model.cascade_goal import Minimise
from services.cli.finite_range import FiniteRange

_BY_WORD: dict[str, Minimise] = {"slowest-tier": "slowest_tier", "end-to-end": "end_to_end"}


def _minimise(_context: click.Context, _option: click.Parameter, word: str) -> Minimise:
    return _BY_WORD[word]


def latency_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --minimise and --latency-s to a command, as `minimise` and `latency_s`."""
    command = click.option(
        "--latency-s",
        type=FiniteRange(min=0, min_open=True),
        help="Answer as well as possible within this latency, which is the one that --minimise names: p95 of the "
        "slowest tier, or the mean from end to end.",
    )(command)
    return click.option(
        "--minimise",
        type=click.Choice(list(_BY_WORD)),
        default="slowest-tier",
        show_default=True,
        callback=_minimise,
        help="Which latency: p95 of the slowest tier, or the mean time of a request over all tiers that it passes, "
        "with their judgements.",
    )(command)
