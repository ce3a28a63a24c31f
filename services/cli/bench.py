"""`penstock bench`: replay a trace through an endpoint, open loop, and report."""

from pathlib import Path
from typing import Any

import click

from mesh.errors import ConfigurationError, TraceError
from mesh.open_files import allow_open_files
from mesh.run_file import read_run_file
from services.cli.connection import DEFAULT_MESH, mesh_option
from services.cli.finite_range import POSITIVE
from services.cli.replay import notices
from services.cli.replay.pool import parse_endpoint
from services.cli.replay.run import Replay, ReplayPlan, TraceSurvey, survey
from services.cli.report_output import check_outputs, output_options, print_notices, write_reports
from services.cli.trace_options import Span, no_requests, recipe_of, slo_of, trace_options
from simulator.report.plot import draw_cdfs
from simulator.report.report import encode_report, summarise
from simulator.traces.prompt import TokenRange

DEFAULT_URL = "http://127.0.0.1:8000"
EXIT_ERRORS = 1
EXIT_INTERRUPTED = 130


@click.command()
@trace_options
@click.option("--url", help="OpenAI-compatible endpoint; default: that of the mesh on this machine, or port 8000.")
@mesh_option
@click.option("--model", help="Name of the model; default: the first one the endpoint lists.")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Default: OPENAI_API_KEY.")
@click.option(
    "--concurrency-limit",
    type=click.IntRange(min=1, max=1 << 16),
    default=4096,
    show_default=True,
    help="Most requests in flight.",
)
@click.option(
    "--timeout-s",
    "deadline_s",
    type=POSITIVE,
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
@output_options
@click.pass_context
def command(ctx: click.Context, /, json_path: str | None, plot_path: Path | None, **options: Any) -> None:
    """Replay a trace through an endpoint, open loop, and report latency, throughput and goodput.

    Ctrl-C still reports what has ended so far. Exit status: 0 done, 1 some requests failed or the endpoint
    cannot be used, 2 used wrongly, 130 interrupted.
    """
    check_outputs(json_path, plot_path)
    plan = _plan(options)
    slo = slo_of(options)
    found = _survey(plan)
    run = Replay(plan)
    model = run.ask_model()
    print_notices(notices.before_replay(found, model.max_model_len_tokens))
    completed = run.run(model, found.requests)
    log = run.log
    report = summarise(log.outcomes, slo, policy=", ".join(sorted(log.policies)) or None, seed=plan.recipe.seed)
    write_reports({model.name: report}, encode_report(report), json_path)
    if plot_path is not None:
        draw_cdfs(plot_path, {model.name: log.outcomes}, slo, title=Path(plan.recipe.source).name)
    print_notices(notices.after_replay(log, report, plan.concurrency_limit))
    if not completed:
        print_notices([f"interrupted: {log.in_flight:,} requests in flight are left out of the report"])
        ctx.exit(EXIT_INTERRUPTED)
    ctx.exit(EXIT_ERRORS if report.errors else 0)


def _plan(options: dict[str, Any]) -> ReplayPlan:
    if not options["api_key"].isascii() or not options["api_key"].isprintable():
        raise click.BadParameter("an API key consists of printable ASCII characters", param_hint="--api-key")
    wanted = options["concurrency_limit"]
    concurrency_limit = allow_open_files(wanted)
    if concurrency_limit < wanted:
        print_notices([f"WARNING: this process may open only {concurrency_limit:,} connections at once (ulimit -n)"])
    return ReplayPlan(
        recipe=recipe_of(options),
        endpoint=parse_endpoint(options["url"] or _endpoint(options["mesh"])),
        model=options["model"],
        api_key=options["api_key"],
        max_requests=options["max_requests"],
        concurrency_limit=concurrency_limit,
        deadline_s=options["deadline_s"],
        vocabulary=_vocabulary(*options["vocab"]),
    )


def _endpoint(mesh: str) -> str:
    """Of the mesh of this name on this machine. Raises ConfigurationError where one that was named does not run."""
    running = read_run_file(mesh)
    if running is not None:
        return running.http_url
    if mesh != DEFAULT_MESH:
        raise ConfigurationError(f"no mesh called {mesh!r} runs on this machine; name an endpoint with --url")
    return DEFAULT_URL


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
        raise click.BadParameter(no_requests(plan.recipe), param_hint="--trace")
    return found
