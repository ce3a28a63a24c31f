"""`penstock attach URL`: a server that runs already joins a mesh."""

import asyncio
import json
import os
import re
import signal
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import click

from engine_worker.engines.attached.advice import advice
from engine_worker.engines.attached.client import ServerClient
from engine_worker.engines.attached.probe import (
    MetricsReader,
    find_abilities,
    limits_of,
    public_name,
    wait_for_model,
    with_secrets,
)
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.attached.wire import Abilities, ServedModel
from engine_worker.engines.interface import EngineLimits
from mesh.errors import ConfigurationError
from mesh.run_file import FoundMesh, find_mesh, run_dir
from mesh.runtime import SystemClock
from services.cli.connection import store_options
from services.cli.supervisor.launcher import SystemLauncher
from services.cli.supervisor.local_mesh import AttachedServer, attached_process, parse_attached
from services.cli.supervisor.supervisor import Supervisor

EXIT_GIVEN_UP = 1
CHECK_S = 5.0
DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a server is."""

    model: ServedModel
    abilities: Abilities
    limits: EngineLimits
    advice: tuple[str, ...]


@click.command()
@click.argument("url")
@store_options
@click.option("--member-id", default="", help="Name of the instance in the mesh; default: from the server's address.")
@click.option("--model", "name", default="", help="What clients call its model; default: what the server calls it.")
@click.option("--served-model", default="", help="Which of its models; default: the first that is no LoRA adapter.")
@click.option(
    "--tokenizer",
    default="",
    help="Directory, or model of the Hugging Face Hub, with the model's tokenizer; default: where the server has its "
    "model from.",
)
@click.option("--kv-events", default="", help="Endpoint of its KV events: tcp://HOST:PORT, or tcp://*:PORT to listen.")
@click.option("--kv-replay", default="", help="Its replay_endpoint, for events that were missed: tcp://HOST:PORT.")
@click.option(
    "--control",
    default="",
    help="Control socket of its connector, ipc:///PATH or tcp://127.0.0.1:PORT, if it was started with Penstock's.",
)
@click.option("--engine-arg", multiple=True, help="NAME=VALUE of what it does not say, such as max_num_seqs=64.")
@click.option("--tool-call-parser", default="", help="vLLM's name of the form in which its model calls tools.")
@click.option("--reasoning-parser", default="", help="vLLM's name of how its model marks its reasoning.")
@click.option("--bind-host", default="127.0.0.1", show_default=True, help="Address that the worker listens on.")
@click.option("--advertise-host", default="", help="Host by which the mesh reaches the worker, where that is another.")
@click.option("--check", is_flag=True, help="Only say what the server is, and what it could do besides.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --check.")
@click.pass_context
def command(ctx: click.Context, /, url: str, check: bool, as_json: bool, **options: Any) -> None:
    """Have a running server serve in a mesh: a stock `vllm serve`, or another with OpenAI's API. Runs until Ctrl-C.

    A worker is started beside it that is its client; the server is neither restarted nor changed. Where it asks for a
    key, set PENSTOCK_ATTACH_API_KEY. Exit status: 0 done, 1 the server cannot be attached, or was given up.
    """
    if as_json and not check:
        raise ConfigurationError("--json says what --check finds: give both")
    extra = tuple(
        f"{name}={options[name]}" for name in ("served_model", "kv_events", "kv_replay", "control") if options[name]
    )
    server = parse_attached(url, options["name"], options["tokenizer"], (*extra, *options["engine_arg"]))
    found = asyncio.run(_find(server))
    if as_json:
        content = {"model": asdict(found.model), "abilities": asdict(found.abilities), "limits": asdict(found.limits)}
        click.echo(json.dumps(content | {"advice": found.advice}, indent=2))
    else:
        _say(server, found)
    if check:
        return
    found_mesh = find_mesh(options["store"], options["mesh"])
    ctx.exit(asyncio.run(_attach(server, found_mesh, options["mesh"], options)))


async def _find(server: AttachedServer) -> Found:
    from engine_worker.engine_args import engine_settings

    settings = with_secrets(engine_settings(AttachedSettings, server.engine_args, {"start_s": CHECK_S}), os.environ)
    client = ServerClient(settings.url, settings.api_key, settings.answer_s)
    try:
        model = await wait_for_model(client, settings, SystemClock())
        abilities = await find_abilities(client, model)
        metrics = await MetricsReader(client, SystemClock()).read()
        limits = limits_of(settings, model, metrics, abilities)
        return Found(model, abilities, limits, advice(settings, abilities, metrics.cores if metrics else 0))
    finally:
        await client.close()


def _say(server: AttachedServer, found: Found) -> None:
    limits = found.limits
    click.echo(f"{server.url}: {limits.label}, serving {server.model or public_name(found.model)}")
    click.echo(f"tokenizer: {server.model_path or found.model.root or 'not said: give --tokenizer'}")
    click.echo(
        f"context {limits.max_model_len_tokens} tokens, {limits.kv_blocks} KV blocks of {limits.block_tokens} tokens"
    )
    for paragraph in found.advice:
        click.echo(paragraph)


async def _attach(server: AttachedServer, found: FoundMesh, mesh: str, options: dict[str, Any]) -> int:
    name = options["member_id"] or default_name(server.url)
    worker_options: tuple[str, ...] = (
        "--bind-host",
        options["bind_host"],
        "--advertise-host",
        options["advertise_host"],
    )
    worker_options += ("--identity", found.identity) if found.identity else ()
    for parser in ("tool_call_parser", "reasoning_parser"):
        worker_options += (f"--{parser.replace('_', '-')}", options[parser]) if options[parser] else ()
    log_dir = run_dir() / mesh / "logs"
    supervisor = Supervisor(SystemLauncher(log_dir), lambda event: click.echo(event, err=True))
    stop_asked, cut_asked = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (cut_asked if stop_asked.is_set() else stop_asked).set()
        )
    await supervisor.add(attached_process(server, name, found.store_url, DRAIN_S, worker_options))
    click.echo(f"attached as {name}; its log: {log_dir}; Ctrl-C to detach", err=True)
    ends = [asyncio.create_task(stop_asked.wait()), asyncio.create_task(supervisor.wait_given_up())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    is_given_up = ends[1].done()
    for task in ends:
        task.cancel()
    stopping = asyncio.create_task(supervisor.stop(DRAIN_S))
    cut = asyncio.create_task(cut_asked.wait())
    await asyncio.wait((stopping, cut), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        supervisor.kill()
    await stopping
    cut.cancel()
    return EXIT_GIVEN_UP if is_given_up else 0


def default_name(url: str) -> str:
    """A member's id from where its server is."""
    return "attached-" + re.sub(r"[^A-Za-z0-9.-]+", "-", urlsplit(url).netloc.rpartition("@")[2]).strip("-")
