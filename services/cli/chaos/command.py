"""`penstock chaos`: break a mesh under running streams and check every answer token for token."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from mesh.run_file import RunFile, read_run_file
from services.cli.chaos.experiment import ChaosPlan, TrafficPlan, encode_report, run_experiment
from services.cli.chaos.soak import SoakPlan, SoakReport, run_soak
from services.cli.chaos.temporary_mesh import TemporaryMesh, temporary_mesh
from services.cli.chaos.verdict import ChaosReport, Fault
from services.cli.connection import mesh_name
from services.cli.finite_range import POSITIVE, FiniteRange
from services.cli.report_output import check_writable

EXIT_FAILED = 1
FAULTS: tuple[Fault, ...] = get_args(Fault)
_TOKENS = {"simulated": 300, "vllm": 96}
_RATES = {"simulated": 4.0, "vllm": 0.5}
"""What an instance on a few cores can answer besides the streams."""
_HEAL_S = {"simulated": 60.0, "vllm": 300.0}
"""A worker that was killed loads its model anew."""
_SHORT_NAMES = {f"{kind}_parallel": f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data")}
_COUNT = click.IntRange(1, 63)
_COPIES = click.IntRange(1, 8)


@click.command()
@click.option("--url", help="Endpoint of a running mesh on this machine; default: start a temporary one.")
@click.option("--mesh", callback=mesh_name, default="default", show_default=True, help="With --url: name of that mesh.")
@click.option("--store", help="With --url: state store of that mesh; default: the local mesh's.")
@click.option("--engine", type=click.Choice(["simulated", "vllm"]), default="simulated", show_default=True)
@click.option("--workers", type=click.IntRange(0, 64), default=3, show_default=True, help="Of the temporary mesh.")
@click.option(
    "--prefill", type=click.IntRange(0, 64), default=0, help="Workers of the temporary mesh for prefill only."
)
@click.option("--decode", type=click.IntRange(0, 64), default=0, help="Workers of the temporary mesh for decode only.")
@click.option("--policy", help="Placement policy of the temporary mesh. Default: that of `penstock up`.")
@click.option(
    "--engine-arg",
    "--engine-option",
    "engine_args",
    multiple=True,
    metavar="NAME=VALUE",
    help="An engine argument of the temporary mesh's workers, such as tensor_parallel_size=2 (tensor_parallel=2 for "
    "short); repeatable.",
)
@click.option("--frontends", type=_COPIES, help="Of the temporary mesh. Default: 1; 2 with --kill-frontend and --soak.")
@click.option(
    "--schedulers", type=_COPIES, help="Of the temporary mesh. Default: 1; 2 with --kill-scheduler and --soak."
)
@click.option("--monitors", type=_COPIES, help="Of the temporary mesh. Default: 1; 2 with --kill-monitor and --soak.")
@click.option("--streams", type=click.IntRange(1, 1024), default=32, show_default=True, help="At the same time.")
@click.option(
    "--rate",
    type=FiniteRange(min=0, max=1000),
    help="New requests a second from the fault on, whether or not earlier ones are answered. Default: 4; vllm: 0.5.",
)
@click.option("--kill", type=_COUNT, help="Number of workers to kill (kill -9); may be all.")
@click.option("--hang", type=_COUNT, help="Number of workers to stop (SIGSTOP).")
@click.option(
    "--drain", type=_COUNT, help="Number of workers to drain: their requests move away, and the workers stay away."
)
@click.option("--restart", type=_COUNT, help="Number of workers to restart, as `penstock restart` does.")
@click.option("--rolling", type=_COUNT, help="How many times to restart every process in turn.")
@click.option("--delete-members", type=_COUNT, help="How many times to delete all member records in the store.")
@click.option(
    "--cut-monitor",
    type=_COUNT,
    help="How many times to cut workers and schedulers from all monitors for 8 s: monitors are stopped (SIGSTOP) and "
    "go on with what they knew.",
)
@click.option("--kill-frontend", type=_COUNT, help="Number of frontends to kill; another has to be left.")
@click.option("--kill-scheduler", type=_COUNT, help="Number of schedulers to kill.")
@click.option("--kill-monitor", type=_COUNT, help="Number of monitors to kill.")
@click.option(
    "--wipe-store",
    type=_COUNT,
    help="How many times to delete every key of the store; settings are put back afterwards, as from a backup.",
)
@click.option(
    "--soak",
    "soak_s",
    type=POSITIVE,
    help="Seconds of one random fault after another (--seed), with an eye on the memory of every role.",
)
@click.option(
    "--schema",
    is_flag=True,
    help="Have every answer be JSON of a schema, and check that it is; --tokens is about what each stream has then.",
)
@click.option(
    "--tokens", type=click.IntRange(8, 100_000), help="Of each stream. Default: 300; vllm: 96, with --schema 300."
)
@click.option(
    "--shared-prefix",
    type=click.IntRange(0, 100_000),
    default=0,
    metavar="TOKENS",
    help="Have all prompts begin with one of three prefixes of so many tokens, so that instances pull them from each "
    "other while the mesh breaks.",
)
@click.option("--seed", default=0, show_default=True, help="Prompts follow from it, and the faults of a soak.")
@click.option("--deadline-s", type=POSITIVE, default=300.0, show_default=True, help="For a single request.")
@click.option(
    "--ready-timeout-s", type=POSITIVE, default=300.0, show_default=True, help="For the temporary mesh to come up."
)
@click.option(
    "--heal-timeout-s",
    type=POSITIVE,
    help="For the mesh to be whole again after a fault. Default: 60; vllm: 300.",
)
@click.option(
    "--logs",
    "logs_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the logs of the temporary mesh in this folder.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report to this file as well.",
)
def command(json_path: Path | None, soak_s: float | None, **options: Any) -> None:
    """Run greedy streams twice, undisturbed and with a mesh that breaks in the middle, and compare.

    With --schema, also check that every whole answer fits its JSON schema.

    One fault at a time; without any, one worker is killed. Prints a JSON report. Exit status: 0 if every request
    finished with exactly the right tokens and the mesh is whole again, otherwise 1. With --soak, also 1 if the memory
    of a role grows by more than 5 % from the first to the last third, or a log tells of a bug.
    """
    fault, count = _fault(options, soak_s)
    logging.disable(logging.WARNING)  # what its own view of a broken mesh misses is no news
    if json_path is not None:
        check_writable(json_path)
    tokens = options["tokens"] or _TOKENS["simulated" if options["schema"] else options["engine"]]
    traffic = TrafficPlan(
        options["streams"],
        tokens,
        _RATES[options["engine"]] if options["rate"] is None else options["rate"],
        options["seed"],
        options["deadline_s"],
        options["schema"],
        options["shared_prefix"],
    )
    heal_s = options["heal_timeout_s"] or _HEAL_S[options["engine"]]
    plan = ChaosPlan(fault, count, traffic, heal_s) if soak_s is None else SoakPlan(soak_s, traffic, heal_s)
    report, failures = asyncio.run(_run(plan, options))
    for failure in failures:
        click.echo(failure, err=True)
    encoded = encode_report(report)
    click.echo(encoded.decode())
    if json_path is not None:
        json_path.write_bytes(encoded + b"\n")
    raise SystemExit(0 if report.passed else EXIT_FAILED)


async def _run(plan: ChaosPlan | SoakPlan, options: dict[str, Any]) -> tuple[ChaosReport | SoakReport, list[str]]:
    began_s = time.monotonic()

    def say(what: str) -> None:
        click.echo(f"{time.monotonic() - began_s:6.1f} s  {what}", err=True)

    if options["url"]:
        running = read_run_file(options["mesh"])
        return await _disturb(plan, options["url"], options["store"], options["mesh"], running, say)
    counts = [options[name] for name in ("workers", "prefill", "decode")]
    if sum(counts) < 1:
        raise click.UsageError("at least one worker is needed")
    if isinstance(plan, ChaosPlan) and plan.fault in ("hang", "drain") and plan.count >= sum(counts):
        raise click.UsageError(f"of {sum(counts)} workers {plan.count} cannot break: one must go on")
    say(f"starting a mesh of {sum(counts)} {options['engine']} workers")
    more = ["--prefill", str(counts[1]), "--decode", str(counts[2])]
    copies = {role: options[f"{role}s"] or _usual_copies(plan, role) for role in ("frontend", "scheduler", "monitor")}
    if isinstance(plan, ChaosPlan) and plan.fault == "kill-frontend" and plan.count >= copies["frontend"]:
        raise click.UsageError(f"of {copies['frontend']} frontends {plan.count} cannot be killed: one must go on")
    more += ["--schedulers", str(copies["scheduler"]), "--monitors", str(copies["monitor"])]
    more += ["--policy", options["policy"]] if options["policy"] else []
    more += [part for option in options["engine_args"] for part in ("--engine-arg", _full_name(option))]
    settings = TemporaryMesh(options["engine"], counts[0], copies["frontend"], tuple(more))
    mesh = temporary_mesh(settings, options["ready_timeout_s"], options["logs_dir"])
    async with mesh as running:
        return await _disturb(plan, running.http_url, running.store_url, "", running, say)


def _full_name(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{_SHORT_NAMES.get(name, name)}{equals}{value}"


def _usual_copies(plan: ChaosPlan | SoakPlan, role: str) -> int:
    return 2 if isinstance(plan, SoakPlan) or plan.fault == f"kill-{role}" else 1


async def _disturb(
    plan: ChaosPlan | SoakPlan,
    url: str,
    store: str | None,
    mesh: str,
    running: RunFile | None,
    say: Callable[[str], None],
) -> tuple[ChaosReport | SoakReport, list[str]]:
    if isinstance(plan, SoakPlan):
        return await run_soak(plan, url, store, mesh, running, say)
    return await run_experiment(plan, url, store, mesh, say)


def _fault(options: dict[str, Any], soak_s: float | None) -> tuple[Fault, int]:
    counts = {fault: options.pop(fault.replace("-", "_")) for fault in FAULTS}
    asked: list[tuple[Fault, int]] = [(fault, count) for fault, count in counts.items() if count is not None]
    if len(asked) > 1:
        raise click.UsageError(f"choose one of {', '.join(f'--{fault}' for fault in FAULTS)}")
    if asked and soak_s is not None:
        raise click.UsageError("--soak chooses the faults itself; give it alone")
    return asked[0] if asked else ("kill", 1)
