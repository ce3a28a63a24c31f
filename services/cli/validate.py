"""`penstock validate`: the simulator against measurements of real engines."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mesh.errors import TraceError
from services.cli.connection import store_options
from services.cli.finite_range import POSITIVE
from services.cli.profiling.plan import ProfileBounds
from services.cli.report_output import STDOUT, check_outputs
from services.cli.terminal_table import print_table
from services.cli.trace_options import Span, no_requests
from services.cli.validation.bounds import is_kept, limit_of
from services.cli.validation.live import LiveMesh, LivePlan, live_cases
from services.cli.validation.temporary_mesh import temporary_mesh
from simulator.profiles.folder import ProfileFolder
from simulator.traces.source import TraceRecipe, open_trace
from simulator.validation.case import Case
from simulator.validation.engine_runs import engine_run_cases, engine_runs
from simulator.validation.single_steps import single_step_cases
from simulator.validation.throughput import METRIC as THROUGHPUT_METRIC
from simulator.validation.throughput import summary, throughput_case, throughput_rows


def encode_cases(cases: Sequence[Case]) -> bytes:
    """{"cases": [{"name", "metric", "measured", "simulated", "error"}]}."""
    return msgspec.json.format(msgspec.json.encode({"cases": cases}), indent=2) + b"\n"


def case_table(cases: Sequence[Case], *, every_row: bool) -> Table:
    """One line a case; single throughput rows only where they are asked for."""
    table = Table("case", "metric", "measured", "simulated", "error", "limit")
    for case in cases:
        if case.metric == THROUGHPUT_METRIC and not every_row:
            continue
        limit = limit_of(case)
        style = "" if is_kept(case) else "bold red"
        table.add_row(
            case.name,
            case.metric,
            f"{case.measured:,.1f}",
            f"{case.simulated:,.1f}",
            f"{case.error:+.1%}",
            "" if limit is None else f"{limit:.0%}",
            style=style,
        )
    return table


EXIT_TOO_FAR = 1

_COUNT = click.IntRange(min=1)
SUITES = ("vllm", "tensorrt-llm", "splitwise")


def _kv_tokens(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """MODEL=TOKENS of all --kv-tokens."""
    told: dict[str, int] = {}
    for value in values:
        name, _, tokens = value.rpartition("=")
        if not name or not tokens.isdecimal() or int(tokens) < 1:
            raise click.BadParameter(f"{value!r} is not MODEL=TOKENS or MODEL/DEVICE=TOKENS")
        told[name] = int(tokens)
    return told


@click.command()
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of published measurements (docs/cost_models.md lists them).",
)
@click.option("--live", "url", help="Endpoint of a running mesh on this machine to compare with, too.")
@click.option(
    "--engine",
    type=click.Choice(["simulated", "vllm"]),
    help="Start a temporary mesh with this engine and compare with it.",
)
@click.option("--workers", type=click.IntRange(1, 16), default=1, show_default=True, help="Of the temporary mesh.")
@click.option("--trace", default="synthetic", show_default=True, help="What to replay through a live mesh.")
@click.option("--clip", type=Span(), default="0:60", show_default=True, help="Seconds of it.")
@click.option("--rate-scale", type=POSITIVE, default=0.25, show_default=True, help="How dense its arrivals are.")
@click.option("--length-scale", type=POSITIVE, default=0.25, show_default=True, help="How long its requests are.")
@click.option("--rounds", type=click.IntRange(1, 64), default=4, show_default=True, help="Turns of profile and replay.")
@click.option("--longest", type=_COUNT, default=2048, show_default=True, help="Longest request of the profile, tokens.")
@click.option("--largest-batch", type=_COUNT, default=16, show_default=True, help="Requests in flight of the profile.")
@click.option(
    "--seconds",
    type=POSITIVE,
    default=5.0,
    show_default=True,
    help="For each configuration of the profile, all rounds.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=lambda: secrets.randbelow(1 << 31),
    show_default="another one each time, so that no prompt is in a cache",
    help="Of live trace and prompts.",
)
@store_options
@click.option("--suite", "suites", multiple=True, type=click.Choice(SUITES), help="Only these; default: all.")
@click.option(
    "--kv-tokens",
    multiple=True,
    metavar="MODEL[/DEVICE]=TOKENS",
    callback=_kv_tokens,
    help="What vLLM logged as its GPU KV cache size, for a run of --data that does not say; without, the size is "
    "estimated from the card's memory. Repeatable.",
)
@click.option("--every-row", is_flag=True, help="Show every row of the throughput table, not only the median.")
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value=STDOUT,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write the cases as JSON; without a file, or with -, print it instead of the table.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    data: Path | None,
    suites: tuple[str, ...],
    kv_tokens: dict[str, int],
    every_row: bool,
    json_path: str | None,
    **options: Any,
) -> None:
    """Simulate what was measured on real engines and report measured, simulated and error of each number.

    --data compares with published measurements, --live or --engine with instances on this machine: they are
    profiled, a clip is replayed through them, and the same clip is simulated. Exit status: 0 every number within its
    limit, 1 some are not, 2 used wrongly.
    """
    if data is None and options["url"] is None and options["engine"] is None:
        raise click.UsageError("--data, --live or --engine says what to compare with")
    check_outputs(json_path, None)
    cases = _published_cases(ProfileFolder(data), suites or SUITES, kv_tokens) if data is not None else []
    cases += _live_cases(options)
    if json_path == STDOUT:
        click.echo(encode_cases(cases), nl=False)
    else:
        if json_path is not None:
            Path(json_path).write_bytes(encode_cases(cases))
        print_table(case_table(cases, every_row=every_row))
    ctx.exit(0 if all(map(is_kept, cases)) else EXIT_TOO_FAR)


def _published_cases(folder: ProfileFolder, suites: tuple[str, ...], kv_tokens: dict[str, int]) -> list[Case]:
    console = Console(stderr=True)
    cases: list[Case] = []
    if "vllm" in suites:
        for run in track(engine_runs(folder, kv_tokens), "vLLM runs", console=console):
            cases += engine_run_cases(folder, run)
    if "tensorrt-llm" in suites:
        rows = [throughput_case(row) for row in track(throughput_rows(folder), "TensorRT-LLM rows", console=console)]
        cases += [*rows, summary(rows)]
    if "splitwise" in suites:
        cases += single_step_cases(folder)
    return cases


def _check_trace(recipe: TraceRecipe) -> None:
    """Before a mesh is started and profiled, not after it. Raises `click.BadParameter`."""
    try:
        requests = sum(1 for _ in open_trace(recipe))
    except (TraceError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--trace") from error
    if requests == 0:
        raise click.BadParameter(no_requests(recipe), param_hint="--trace")


def _live_cases(options: dict[str, Any]) -> list[Case]:
    clip_start_s, clip_end_s = options["clip"]
    recipe = TraceRecipe(
        source=options["trace"],
        seed=options["seed"],
        clip_start_s=clip_start_s,
        clip_end_s=clip_end_s,
        rate_scale=options["rate_scale"],
        length_scale=options["length_scale"],
    )
    if options["url"] is not None or options["engine"] is not None:
        _check_trace(recipe)
    bounds = ProfileBounds(
        longest_tokens=options["longest"], largest_batch=options["largest_batch"], seconds=options["seconds"]
    )
    plan = LivePlan(recipe, bounds, options["rounds"])
    cases: list[Case] = []
    if options["url"] is not None:
        cases += live_cases(LiveMesh(options["url"], options["store"], options["mesh"]), plan)
    if options["engine"] is not None:
        with temporary_mesh(options["engine"], options["workers"]) as mesh:
            cases += live_cases(mesh, plan)
    return cases
