"""`penstock replay FILE...`: whatever Penstock has recorded, as one console."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec

from controlplane.recording import events
from controlplane.recording.replay import replay
from fault_simulation.timeline import read_timeline
from mesh.errors import ConfigurationError
from services.cli.console.decided import DecisionsRecorder
from services.cli.console.output import console_option, write_console
from services.cli.console.simulated_mesh import record_timeline
from services.cli.report_output import check_writable
from services.frontend.console.recorded import from_zero
from services.frontend.console.single_page import recording_of


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run out of a file."""

    file: Path
    name: str
    run: bytes
    """A `RecordedRun` as JSON."""
    is_simulated: bool


class Run(msgspec.Struct):
    """What is read of a `RecordedRun` here."""

    name: str
    requests: int


class Page(msgspec.Struct):
    """What `recorded.recording` makes."""

    is_simulated: bool
    runs: list[msgspec.Raw]


@click.command()
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@console_option
def command(files: tuple[Path, ...], as_json: bool, console_path: Path | None) -> None:
    """List the runs that FILEs hold, and with --console show them side by side on one time slider.

    A FILE is a console that was written before (--console of simulate, compare, top, fuzz, decisions or replay), what
    `penstock serve scheduler --record` wrote, or a timeline that `penstock fuzz --save` left behind. Runs of several
    files begin at the same time, 0.
    """
    if console_path is not None:
        check_writable(console_path)
    runs = _with_names_of_their_own([each for file in files for each in read(file)])
    found = [(each, msgspec.json.decode(each.run, type=Run)) for each in runs]
    if as_json:
        shown = [
            {"file": str(each.file), "name": each.name, "requests": run.requests, "is_simulated": each.is_simulated}
            for each, run in found
        ]
        click.echo(json.dumps({"runs": shown}, indent=2))
    else:
        for each, run in found:
            click.echo(f"{each.file}: {each.name}, {run.requests:,} requests")
    if console_path is not None:
        is_one = len(files) == 1
        encoded = [each.run if is_one else from_zero(each.run, each.name) for each in runs]
        title = ", ".join(file.name for file in files)
        write_console(console_path, title, encoded, is_simulated=not is_one or runs[0].is_simulated)


def read(file: Path) -> list[Recorded]:
    """The runs that a file holds. Raises ConfigurationError for what is no recording."""
    with file.open("rb") as lines:
        first = lines.readline(1 << 20)
    if first.lower().startswith(b"<!doctype html"):
        return _of_page(file)
    if _is_decisions(first):
        recorder = DecisionsRecorder(file.stem)
        with file.open("rb") as lines:
            outcome = replay(lines, recorder.watch)
        if not recorder.recorder.moments.states:
            raise ConfigurationError(f"{file} holds no moment that has a time: record while requests are served")
        return [Recorded(file, recorder.name, recorder.encode(outcome), is_simulated=True)]
    try:
        timeline = read_timeline(file.read_bytes())
    except msgspec.MsgspecError:
        raise ConfigurationError(
            f"{file} is no recording: neither a console (--console of simulate, compare, top, fuzz, decisions), nor "
            "what `penstock serve scheduler --record` writes, nor a timeline of `penstock fuzz --save`; a trace is "
            "run by `penstock simulate --trace`"
        ) from None
    _, run = record_timeline(timeline)
    return [Recorded(file, file.stem, run, is_simulated=True)]


def _of_page(file: Path) -> list[Recorded]:
    try:
        found = recording_of(file.read_bytes())
        if found is None:
            raise ConfigurationError(f"{file} is a page, and holds no recording of Penstock")
        page = msgspec.json.decode(found, type=Page)
        names = [msgspec.json.decode(run, type=Run).name for run in page.runs]
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}; write it again") from None
    return [Recorded(file, name, bytes(run), page.is_simulated) for name, run in zip(names, page.runs, strict=True)]


def _is_decisions(line: bytes) -> bool:
    try:
        return isinstance(events.DECODER.decode(line), events.Begun)
    except msgspec.DecodeError:
        return False


def _with_names_of_their_own(runs: Sequence[Recorded]) -> list[Recorded]:
    """By which they can be told apart: with the file's, and a number, where that is needed."""
    counts, taken, named = Counter(each.name for each in runs), set[str](), []
    for each in runs:
        name = each.name if counts[each.name] == 1 else f"{each.file.stem}: {each.name}"
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name} ({number})"
        taken.add(free)
        named.append(replace(each, name=free))
    return named
