"""`penstock doctor`: is this machine fit for a mesh, and what is to be mended?"""

import json
from dataclasses import asdict

import click

from services.cli.connection import store_options
from services.cli.doctor.collect import collect
from services.cli.doctor.judge import Finding, Level, judge

EXIT_PROBLEMS = 1
_SIGNS = {
    Level.OK: ("ok", "green"),
    Level.NOTE: ("note", "cyan"),
    Level.WARNING: ("warn", "yellow"),
    Level.PROBLEM: ("FAIL", "red"),
}


@click.command()
@store_options
@click.option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    default=(8000,),
    show_default=True,
    help="A port that a process is to listen on; may be given many times.",
)
@click.option("--bind-host", default="127.0.0.1", show_default=True, help="Address on which the ports are tried.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context, /, mesh: str, store: str | None, ports: tuple[int, ...], bind_host: str, as_json: bool
) -> None:
    """Check this machine, and say what to mend.

    GPUs and their driver, vLLM, UCX and what each of its transports is used for, shared memory, limits, the state
    store, clocks, ports, installed extras. Run it on every machine of a mesh, in the container that runs workers.

    The JSON form is {"findings": [{"check", "level", "found", "mend"}], "problems": N, "warnings": N, "facts": {...}}.
    Exit status: 0 nothing is broken, 1 a problem was found. Warnings and notes do not change it.
    """
    facts = collect(store, mesh, ports, bind_host)
    findings = judge(facts)
    problems, warnings = (
        sum(finding.level is level for finding in findings) for level in (Level.PROBLEM, Level.WARNING)
    )
    if as_json:
        output = {"findings": [asdict(each) for each in findings], "problems": problems, "warnings": warnings}
        click.echo(json.dumps(output | {"facts": asdict(facts)}, indent=2))
    else:
        for finding in findings:
            click.echo(_line(finding))
        click.echo(f"{problems} problems, {warnings} warnings")
    ctx.exit(EXIT_PROBLEMS if problems else 0)


def _line(finding: Finding) -> str:
    word, colour = _SIGNS[finding.level]
    line = f"{click.style(f'{word:<5}', fg=colour)}{finding.check:<15}{finding.found}"
    return f"{line}\n{'':<20}-> {finding.mend}" if finding.mend else line
