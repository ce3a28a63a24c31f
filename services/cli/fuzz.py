"""`penstock fuzz`: simulate whole meshes under faults, each from one seed."""

import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from fault_simulation.draws import draw
from fault_simulation.run import Outcome, run_seeds, run_timeline
from fault_simulation.shrink import shrink
from fault_simulation.story import tell
from fault_simulation.timeline import Timeline, read_timeline
from services.cli.console.output import console_option, write_console
from services.cli.console.simulated_mesh import record_timeline
from services.cli.report_output import STDOUT, check_writable
from services.cli.simulation.progress import progress_bars

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
MOST_SHRUNK = 5
"""Failures of other kinds than those before that are shrunk in one call."""


class SeedRange(click.ParamType[range]):
    """The click type of FIRST:END, a range of seeds without its end."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        """Fails for what is no range, or an empty one."""
        match = re.fullmatch(r"(\d+):(\d+)", str(value))
        if match is None or int(match[1]) >= int(match[2]):
            self.fail(f"{value!r} is not of the form FIRST:END, as in 0:1000", param, ctx)
        return range(int(match[1]), int(match[2]))


@click.command()
@click.option("--seeds", type=SeedRange(), help="FIRST:END: simulate these seeds, END left out.")
@click.option("--seed", type=click.IntRange(min=0), help="Simulate one seed.")
@click.option(
    "--timeline",
    "timeline_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Simulate what a file says, as a failure leaves one behind.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 1024),
    default=lambda: os.cpu_count() or 1,
    show_default="one for each CPU",
    help="Processes, with --seeds.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, allow_dash=True), help="Write the result as JSON.")
@click.option("--story", is_flag=True, help="With --seed or --timeline: tell every message.")
@click.option("--no-shrink", is_flag=True, help="Report failures as they are found.")
@click.option(
    "--save",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the timelines of failures to this folder, each as soon as it is found; it is made if there is none.",
)
@console_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    seeds: range | None,
    seed: int | None,
    timeline_path: Path | None,
    jobs: int,
    json_path: str | None,
    story: bool,
    no_shrink: bool,
    folder: Path | None,
    console_path: Path | None,
) -> None:
    """Simulate whole meshes on virtual time while processes die, links break and clients leave, and check every answer.

    A failing seed is made as small as possible and told. The JSON form is {"seeds", "failed": [{"seed", "violations"}],
    "virtual_s", "cpu_s"}. Ctrl-C ends --seeds with what is known by then. Exit status: 0 nothing failed, 1 something
    did, 2 used wrongly, 130 interrupted before anything failed.
    """
    if sum(given is not None for given in (seeds, seed, timeline_path)) != 1:
        raise click.UsageError("give one of --seeds, --seed and --timeline")
    if story and seeds is not None:
        raise click.UsageError("--story tells one simulation: give --seed or --timeline")
    if console_path is not None:
        if seeds is not None:
            raise click.UsageError("--console is of one simulation: give --seed or --timeline")
        check_writable(console_path)
    if json_path not in (None, STDOUT):
        check_writable(Path(json_path))
    if folder is not None:
        _make(folder)
    is_complete = True
    if seeds is not None:
        outcomes, failed = _many(seeds, jobs, folder, quiet=json_path == STDOUT)
        is_complete = len(outcomes) == len(seeds)
        timelines = [(draw(outcome.seed), outcome) for outcome in failed]
    else:
        timeline = _timeline(timeline_path) if timeline_path is not None else draw(seed or 0)
        outcome = run_timeline(timeline)
        outcomes, failed = [outcome], [outcome] if outcome.violations else []
        timelines = [(timeline, outcome)] if failed and not story else []
        _save(folder, failed, timeline)
        if story:
            click.echo(tell(timeline, every_message=True))
        if console_path is not None:
            _record(console_path, timeline, outcome)
    if json_path is not None:
        _write(json_path, outcomes, failed)
    if json_path != STDOUT:
        _explain(timelines, no_shrink=no_shrink or not is_complete, folder=folder)
        click.echo(_summary(outcomes, failed))
    if not is_complete:
        click.echo(f"interrupted: {len(seeds or ()) - len(outcomes):,} seeds are left out", err=True)
    ctx.exit(EXIT_FAILED if failed else 0 if is_complete else EXIT_INTERRUPTED)


def _record(path: Path, timeline: Timeline, outcome: Outcome) -> None:
    """Simulated once more, watched; says so if that made a difference."""
    watched, run = record_timeline(timeline)
    write_console(path, f"fuzz, seed {timeline.seed}", [run], is_simulated=True)
    if watched.kinds != outcome.kinds:
        seen = ", ".join(sorted(watched.kinds)) or "nothing"
        click.echo(f"{path}: while somebody watches, {seen} fails: whoever looks sends messages too", err=True)


def _many(seeds: range, jobs: int, folder: Path | None, *, quiet: bool) -> tuple[list[Outcome], list[Outcome]]:
    """All outcomes, or those until Ctrl-C; and those that failed."""
    outcomes: list[Outcome] = []
    failed: list[Outcome] = []
    with progress_bars(("seeds",), len(seeds)) as show, suppress(KeyboardInterrupt):
        for outcome in run_seeds(seeds, jobs):
            outcomes.append(outcome)
            if outcome.violations:
                failed.append(outcome)
                _save(folder, [outcome], draw(outcome.seed))
                if not quiet:
                    click.echo(
                        "".join(f"seed {outcome.seed}: {violation}\n" for violation in outcome.violations), nl=False
                    )
            show("seeds", len(outcomes))
    return outcomes, sorted(failed, key=lambda outcome: outcome.seed)


def _make(folder: Path) -> None:
    """Before a long run, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"cannot make {folder}: {error.strerror}") from None


def _save(folder: Path | None, failed: list[Outcome], timeline: Timeline) -> None:
    for outcome in failed:
        if folder is not None:
            (folder / f"seed_{outcome.seed}.json").write_text(timeline.to_json())


def _timeline(path: Path) -> Timeline:
    try:
        return read_timeline(path.read_bytes())
    except msgspec.MsgspecError as error:
        raise click.UsageError(f"{path} holds no timeline: {error}") from None


def _explain(timelines: list[tuple[Timeline, Outcome]], *, no_shrink: bool, folder: Path | None) -> None:
    """One failure of each kind."""
    told: set[frozenset[str]] = set()
    for timeline, outcome in timelines:
        if no_shrink or outcome.kinds in told or len(told) >= MOST_SHRUNK:
            continue
        told.add(outcome.kinds)
        kind = outcome.violations[0].kind
        fails = partial(_fails, kind)
        click.echo(f"\nseed {outcome.seed}: looking for the smallest timeline with: {kind}", err=True)
        smallest = shrink(timeline, fails)
        click.echo(tell(smallest))
        if folder is not None:
            (folder / f"seed_{outcome.seed}_shrunk.json").write_text(smallest.to_json())


def _fails(kind: str, timeline: Timeline) -> bool:
    return kind in run_timeline(timeline).kinds


def _write(json_path: str, outcomes: list[Outcome], failed: list[Outcome]) -> None:
    document = {
        "seeds": len(outcomes),
        "failed": [
            {"seed": outcome.seed, "violations": [str(violation) for violation in outcome.violations]}
            for outcome in failed
        ],
        "virtual_s": round(sum(outcome.virtual_s for outcome in outcomes), 1),
        "cpu_s": round(sum(outcome.cpu_s for outcome in outcomes), 1),
    }
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    if json_path == STDOUT:
        click.echo(encoded, nl=False)
    else:
        Path(json_path).write_text(encoded)


def _summary(outcomes: list[Outcome], failed: list[Outcome]) -> str:
    virtual_s = sum(outcome.virtual_s for outcome in outcomes)
    cpu_s = sum(outcome.cpu_s for outcome in outcomes)
    return f"{len(outcomes)} seeds, {len(failed)} failed; {virtual_s:,.0f} virtual seconds in {cpu_s:,.0f} s of CPU"
