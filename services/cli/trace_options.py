"""The options by which commands choose a trace and shape its load."""

import math
from collections.abc import Callable
from typing import Any

import click

from services.cli.finite_range import POSITIVE, FiniteRange
from simulator.report.report import Slo
from simulator.traces.source import TraceRecipe

Command = Callable[..., None]


class Span(click.ParamType[tuple[float, float]]):
    """START:END; either may be left out."""

    name = "start:end"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """The pair, open ends as 0 and infinity."""
        if isinstance(value, tuple):
            return value
        start, colon, end = str(value).partition(":")
        try:
            span = (float(start or 0), float(end or "inf"))
        except ValueError:
            self.fail(f"{value!r} is not of the form START:END", param, ctx)
        if not colon or not 0 <= span[0] < span[1]:
            self.fail(f"{value!r} is not of the form START:END with START below END", param, ctx)
        return span


_TRACE_HELP = "Azure CSV, Mooncake, ServeGen or agentic JSONL, or a list of lengths (also .gz), or 'synthetic'."
_TRACE = click.option("--trace", required=True, help=_TRACE_HELP)
_OPTIONAL_TRACE = click.option(
    "--trace", help=f"{_TRACE_HELP} Default: synthetic conversations, at a rate where placement matters."
)
_OPTIONS = (
    click.option(
        "--part", default="", help="Which part of a list of lengths, by a piece of its name; default: the first."
    ),
    click.option("--clip", type=Span(), default="0:", help="Seconds of the trace to replay, e.g. 0:120."),
    click.option("--rate-scale", type=POSITIVE, default=1.0, help="2 makes arrivals twice as dense."),
    click.option(
        "--copies",
        type=click.IntRange(1, 4096),
        default=1,
        show_default=True,
        help="Number of copies of the trace to superpose, shifted in time: more load, the same bursts and span.",
    ),
    click.option("--length-scale", type=POSITIVE, default=1.0, help="0.5 halves prompts and answers."),
    click.option("--max-requests", type=click.IntRange(min=1), help="Stop after this many requests."),
    click.option(
        "--shared-prefix",
        type=FiniteRange(0, 1),
        default=0.0,
        help="Share of each prompt taken from a common prefix, where the trace tells none.",
    ),
    click.option(
        "--prefix-groups",
        type=click.IntRange(min=1, max=1 << 20),
        default=16,
        show_default=True,
        help="How many such prefixes there are.",
    ),
    click.option("--slo-ttft-ms", type=POSITIVE, help="Limit for goodput; default: none."),
    click.option("--slo-tpot-ms", type=POSITIVE, help="Limit for goodput; default: none."),
    click.option(
        "--seed",
        type=click.IntRange(min=0, max=(1 << 63) - 1),
        default=0,
        show_default=True,
        help="Everything that is drawn (prompts, shared prefixes, synthetic arrivals) follows from it.",
    ),
)


def trace_options(command: Command) -> Command:
    """Add the options that choose and reshape a trace to a command."""
    return _with(_TRACE, command)


def optional_trace_options(command: Command) -> Command:
    """The same where the trace may be left out; it is then None."""
    return _with(_OPTIONAL_TRACE, command)


def _with(trace_option: Callable[[Command], Command], command: Command) -> Command:
    for option in reversed((trace_option, *_OPTIONS)):
        command = option(command)
    return command


def recipe_of(options: dict[str, Any]) -> TraceRecipe:
    """The trace that the options describe."""
    clip_start_s, clip_end_s = options["clip"]
    return TraceRecipe(
        source=options["trace"],
        seed=options["seed"],
        clip_start_s=clip_start_s,
        clip_end_s=clip_end_s,
        rate_scale=options["rate_scale"],
        length_scale=options["length_scale"],
        shared_prefix=options["shared_prefix"],
        prefix_groups=options["prefix_groups"],
        copies=options["copies"],
        part=options["part"],
    )


def slo_of(options: dict[str, Any]) -> Slo:
    """The limits that the options set."""
    return Slo(ttft_ms=options["slo_ttft_ms"], tpot_ms=options["slo_tpot_ms"])


def no_requests(recipe: TraceRecipe) -> str:
    """What to say of a trace of which nothing is left to run."""
    if (recipe.clip_start_s, recipe.clip_end_s) == (0.0, math.inf):
        return f"{recipe.source} has no requests"
    return f"no request of {recipe.source} arrives within --clip"
