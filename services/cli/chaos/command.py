"""`penstock chaos`: break workers under running streams and check every answer token for token."""

import asyncio
import time
from pathlib import Path
from typing import Any

import click

from services.cli.chaos.experiment import ChaosPlan, encode_report, run_experiment
from services.cli.chaos.own_mesh import own_mesh
from services.cli.chaos.verdict import ChaosReport, Fault
from services.cli.connection import mesh_name
from services.cli.finite_range import POSITIVE
from services.cli.report_output import check_writable

EXIT_FLAWED = 1
_TOKENS = {"simulated": 300, "vllm": 96}


@click.command()
@click.option("--url", help="Endpoint of a running mesh on this machine; default: bring up an own one and end it.")
@click.option("--mesh", callback=mesh_name, default="default", show_default=True, help="With --url: name of that mesh.")
@click.option("--store", help="With --url: state store of that mesh; default: the local mesh's.")
@click.option("--engine", type=click.Choice(["simulated", "vllm"]), default="simulated", show_default=True)
@click.option("--workers", type=click.IntRange(0, 64), default=3, show_default=True, help="Of the own mesh.")
@click.option("--prefill", type=click.IntRange(0, 64), default=0, help="Workers of the own mesh for prefill only.")
@click.option("--decode", type=click.IntRange(0, 64), default=0, help="Workers of the own mesh for decode only.")
@click.option("--streams", type=click.IntRange(1, 1024), default=32, show_default=True, help="At the same time.")
@click.option("--kill", type=click.IntRange(1, 63), help="Kill so many workers (kill -9).")
@click.option("--hang", type=click.IntRange(1, 63), help="Stop so many (SIGSTOP).")
@click.option("--drain", type=click.IntRange(1, 63), help="Drain so many: their requests move away.")
@click.option("--tokens", type=click.IntRange(8, 100_000), help="Of each stream. Default: 300; vllm: 96.")
@click.option("--seed", default=0, show_default=True, help="Prompts follow from it.")
@click.option("--deadline-s", type=POSITIVE, default=300.0, show_default=True, help="For one run of all streams.")
@click.option("--ready-timeout-s", type=POSITIVE, default=300.0, show_default=True, help="For the own mesh to come up.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report to this file as well.",
)
def command(kill: int | None, hang: int | None, drain: int | None, json_path: Path | None, **options: Any) -> None:
    """Run greedy streams twice, undisturbed and with workers breaking in the middle, and compare.

    Prints a JSON report. Exit status: 0 if every stream finished with exactly the right tokens, otherwise 1.
    """
    fault, victims = _fault(kill, hang, drain)
    if json_path is not None:
        check_writable(json_path)
    plan = ChaosPlan(
        fault,
        victims,
        options["streams"],
        options["tokens"] or _TOKENS[options["engine"]],
        options["seed"],
        options["deadline_s"],
    )
    report, stories = asyncio.run(_run(plan, options))
    for story in stories:
        click.echo(story, err=True)
    encoded = encode_report(report)
    click.echo(encoded.decode())
    if json_path is not None:
        json_path.write_bytes(encoded + b"\n")
    raise SystemExit(0 if report.flawless else EXIT_FLAWED)


async def _run(plan: ChaosPlan, options: dict[str, Any]) -> tuple[ChaosReport, list[str]]:
    began_s = time.monotonic()

    def say(what: str) -> None:
        click.echo(f"{time.monotonic() - began_s:6.1f} s  {what}", err=True)

    if options["url"]:
        return await run_experiment(plan, options["url"], options["store"], options["mesh"], say)
    counts = [options[name] for name in ("workers", "prefill", "decode")]
    if sum(counts) < 2:
        raise click.UsageError("at least two workers are needed: one that is broken, one that goes on")
    if plan.victims >= sum(counts):
        raise click.UsageError(f"of {sum(counts)} workers {plan.victims} cannot break: one must go on")
    say(f"starting a mesh of {sum(counts)} {options['engine']} workers")
    async with own_mesh(
        options["engine"], counts[0], options["ready_timeout_s"], prefill=counts[1], decode=counts[2]
    ) as (url, store):
        return await run_experiment(plan, url, store, "", say)


def _fault(kill: int | None, hang: int | None, drain: int | None) -> tuple[Fault, int]:
    asked: list[tuple[Fault, int]] = []
    if kill is not None:
        asked.append(("kill", kill))
    if hang is not None:
        asked.append(("hang", hang))
    if drain is not None:
        asked.append(("drain", drain))
    if len(asked) > 1:
        raise click.UsageError("choose one of --kill, --hang and --drain")
    return asked[0] if asked else ("kill", 1)
