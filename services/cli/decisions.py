"""`penstock decisions FILE`: a scheduler's recording, run again outside of the mesh."""

import json
from pathlib import Path

import click
import msgspec

from controlplane.recording.replay import Replayed, replay
from mesh.errors import ConfigurationError
from services.cli.console.decided import DecisionsRecorder
from services.cli.console.output import console_option, write_console
from services.cli.report_output import check_writable

SHOWN_DIFFERENCES = 10


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@console_option
def command(file: Path, as_json: bool, console_path: Path | None) -> None:
    """Run FILE, which `penstock serve scheduler --record FILE` has written, through the same policies again.

    They are those of `penstock simulate` too, over the same table of the cluster. The exit status is 1 if any decision
    comes out otherwise, or is made over another snapshot, and 2 if there is none to compare.
    """
    if console_path is not None:
        check_writable(console_path)
    recorder = DecisionsRecorder(file.stem)
    with file.open("rb") as lines:
        outcome = replay(lines, None if console_path is None else recorder.watch)
    if outcome.decisions == 0:
        raise ConfigurationError(f"{file} holds no decision to compare: record while requests are served")
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(outcome) | {"decisions": outcome.decisions}, indent=2))
    else:
        _print(outcome)
    if console_path is not None:
        write_console(console_path, file.name, [recorder.encode(outcome)], is_simulated=True)
    if outcome.equal != outcome.decisions:
        raise SystemExit(1)


def _print(outcome: Replayed) -> None:
    click.echo(
        f"{outcome.placements} placements, {outcome.decode_placements} decode instances chosen later, "
        f"{outcome.observations} looks; policies: {', '.join(outcome.policies)}"
    )
    click.echo(f"{outcome.equal} of {outcome.decisions} decisions are equal")
    for each in outcome.different[:SHOWN_DIFFERENCES]:
        click.echo(f"line {each.line}, {each.request_id}: recorded {each.recorded}; now {each.replayed}")
