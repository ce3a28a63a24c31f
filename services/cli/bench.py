"""`penstock bench`: replay a trace through an endpoint, open loop, and report."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mesh.errors import TraceError
from services.cli.replay import remarks
from services.cli.replay.pool import parse_endpoint
from services.cli.replay.run import Replay, ReplayPlan, TraceSurvey, allow_open_files, survey
from simulator.report.plot import draw_cdfs, require_matplotlib
from simulator.report.report import Report, Slo, encode_report, summarise
from simulator.report.table import report_table
from simulator.traces.prompt import TokenRange
from simulator.traces.source import TraceRecipe

EXIT_ERRORS = 1
EXIT_INTERRUPTED = 130
STDOUT = "-"


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


_positive = click.FloatRange(min=0, min_open=True, max=1e6)


@click.command()
@click.option("--trace", required=True, help="Azure CSV or Mooncake JSONL (also .gz), or 'synthetic'.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="OpenAI-compatible endpoint.")
@click.option("--model", help="Name of the model; default: the first one the endpoint lists.")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Default: OPENAI_API_KEY.")
@click.option("--clip", type=Span(), default="0:", help="Seconds of the trace to replay, e.g. 0:120.")
@click.option("--rate-scale", type=_positive, default=1.0, help="2 makes arrivals twice as dense.")
@click.option("--length-scale", type=_positive, default=1.0, help="0.5 halves prompts and answers.")
@click.option("--max-requests", type=click.IntRange(min=1), help="Stop after so many.")
@click.option(
    "--shared-prefix",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Share of each prompt taken from a common prefix, where the trace tells none.",
)
@click.option(
    "--prefix-groups",
    type=click.IntRange(min=1, max=1 << 20),
    default=16,
    show_default=True,
    help="How many such prefixes there are.",
)
@click.option("--slo-ttft-ms", type=_positive, help="Limit for goodput; default: none.")
@click.option("--slo-tpot-ms", type=_positive, help="Limit for goodput; default: none.")
@click.option(
    "--concurrency-limit",
    type=click.IntRange(min=1, max=1 << 16),
    default=4096,
    show_default=True,
    help="Most requests in flight.",
)
@click.option(
    "--timeout",
    "deadline_s",
    type=_positive,
    default=600.0,
    show_default=True,
    help="Seconds after which one request counts as failed.",
)
@click.option(
    "--vocab",
    type=Span(),
    default="3:500",
    show_default=True,
    help="Token ids to draw prompts from, where the endpoint does not tell its vocabulary.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=(1 << 63) - 1),
    default=0,
    show_default=True,
    help="Prompts, shared prefixes and synthetic arrivals follow from it.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write the report as JSON; - prints it instead of the table.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the CDFs of TTFT, TPOT and end-to-end latency as a PNG.",
)
@click.pass_context
def command(ctx: click.Context, /, json_path: str | None, plot_path: Path | None, **options: Any) -> None:
    """Replay a trace through an endpoint, open loop, and report latency, throughput and goodput.

    Ctrl-C still reports what has ended so far. Exit status: 0 done, 1 some requests failed or the endpoint
    cannot be used, 2 used wrongly, 130 interrupted.
    """
    _check_outputs(json_path, plot_path)
    plan = _plan(options)
    slo = Slo(ttft_ms=options["slo_ttft_ms"], tpot_ms=options["slo_tpot_ms"])
    found = _survey(plan)
    run = Replay(plan)
    model = run.ask_model()
    _say(remarks.before(found, model.max_model_len_tokens))
    completed = run.run(model, found.requests)
    log = run.log
    report = summarise(log.outcomes, slo, policy=", ".join(sorted(log.policies)) or None, seed=plan.recipe.seed)
    _write(model.name, report, json_path)
    if plot_path is not None:
        draw_cdfs(plot_path, {model.name: log.outcomes}, slo, title=Path(plan.recipe.source).name)
    _say(remarks.after(log, report, plan.concurrency_limit))
    if not completed:
        _say([f"interrupted: {log.in_flight:,} requests in flight are left out of the report"])
        ctx.exit(EXIT_INTERRUPTED)
    ctx.exit(EXIT_ERRORS if report.errors else 0)


def _check_outputs(json_path: str | None, plot_path: Path | None) -> None:
    """Before a long run, not after it."""
    paths = [Path(json_path)] if json_path not in (None, STDOUT) else []
    for path in (*paths, *([plot_path] if plot_path else [])):
        if not path.resolve().parent.is_dir():
            raise click.UsageError(f"cannot write {path}: its directory does not exist")
    if plot_path:
        require_matplotlib()


def _plan(options: dict[str, Any]) -> ReplayPlan:
    clip_start_s, clip_end_s = options["clip"]
    recipe = TraceRecipe(
        source=options["trace"],
        seed=options["seed"],
        clip_start_s=clip_start_s,
        clip_end_s=clip_end_s,
        rate_scale=options["rate_scale"],
        length_scale=options["length_scale"],
        shared_prefix=options["shared_prefix"],
        prefix_groups=options["prefix_groups"],
    )
    if not options["api_key"].isascii() or not options["api_key"].isprintable():
        raise click.BadParameter("an API key consists of printable ASCII characters", param_hint="--api-key")
    wanted = options["concurrency_limit"]
    concurrency_limit = allow_open_files(wanted)
    if concurrency_limit < wanted:
        _say([f"WARNING: this process may open only {concurrency_limit:,} connections at once (ulimit -n)"])
    return ReplayPlan(
        recipe=recipe,
        endpoint=parse_endpoint(options["url"]),
        model=options["model"],
        api_key=options["api_key"],
        max_requests=options["max_requests"],
        concurrency_limit=concurrency_limit,
        deadline_s=options["deadline_s"],
        vocabulary=_vocabulary(*options["vocab"]),
    )


def _vocabulary(first: float, end: float) -> TokenRange:
    try:
        return TokenRange(int(first), int(end))
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{first:g}:{end:g} is no range of token ids: {error}", param_hint="--vocab"
        ) from error


def _survey(plan: ReplayPlan) -> TraceSurvey:
    try:
        found = survey(plan)
    except (TraceError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--trace") from error
    if found.requests == 0:
        raise click.UsageError("no request of the trace arrives within --clip")
    return found


def _write(name: str, report: Report, json_path: str | None) -> None:
    if json_path == STDOUT:
        click.echo(encode_report(report), nl=False)
        return
    if json_path is not None:
        Path(json_path).write_bytes(encode_report(report))
    Console().print(report_table({name: report}))


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line, err=True)
