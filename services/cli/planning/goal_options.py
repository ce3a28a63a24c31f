"""What `penstock plan cascade` and `penstock plan goal` are asked alike: --minimise with --latency-s, --probability,
--judge-gpu-s."""

from collections.abc import Callable
from typing import Any

import click

from controlplane.model.cascade_goal import PROBABILITY, Minimise
from services.cli.finite_range import FiniteRange

_BY_WORD: dict[str, Minimise] = {"slowest-tier": "slowest_tier", "end-to-end": "end_to_end"}


def _minimise(_context: click.Context, _option: click.Parameter, word: str) -> Minimise:
    return _BY_WORD[word]


probability_option = click.option(
    "--probability",
    type=FiniteRange(min=0, max=100, max_open=True),
    default=PROBABILITY,
    show_default=True,
    metavar="PERCENT",
    help="Hold --quality with this probability, tested on labelled requests that the thresholds were not chosen by. "
    "0: just reach it on the sample, which misses it half of the time.",
)
judge_gpu_option = click.option(
    "--judge-gpu-s",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="GPU time of one judgement: the judge's GPUs are taken out of --gpus. 0: it runs elsewhere.",
)


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
