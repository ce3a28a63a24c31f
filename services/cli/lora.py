"""`penstock lora load|unload|list`: the LoRA adapters of a running mesh."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import click

from controlplane.model.cascade_record import CASCADES_PREFIX
from controlplane.model.duties import POOLS
from mesh.errors import RpcError, StoreUnavailable
from mesh.membership import ChangeKind, Directory, MemberChange
from mesh.runtime import system_runtime
from mesh.store.interface import StateStore
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import (
    AS_OPERATOR,
    answering_member,
    call,
    mesh_directory,
    mesh_store,
    run,
    same_mesh,
    store_options,
)
from services.cli.proto_json import plain
from services.frontend.errors import ApiError
from services.frontend.requests.adapter_loader import AdapterLoader
from services.frontend.requests.adapters import AdapterDirectory

HEARD_S: Final = 5.0
JSON_OPTION: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def command() -> None:
    """Load LoRA adapters into all workers of their base model, take them out again, or list them.

    Clients ask for an adapter by its name, as `model`.
    """


@command.command("load")
@click.argument("name")
@click.argument("path")
@click.option("--base-model", default="", help="The model that it changes; needed where several take adapters.")
@click.option("--in-place", is_flag=True, help="Take the place of the adapter that has this name.")
@click.option("--3d-lora-weight", "is_3d_lora_weight", is_flag=True, help="As vLLM's is_3d_lora_weight.")
@store_options
@JSON_OPTION
def load(
    name: str,
    path: str,
    base_model: str,
    in_place: bool,
    is_3d_lora_weight: bool,
    store: str | None,
    mesh: str,
    as_json: bool,
) -> None:
    """Load the adapter at PATH, a directory on the workers' machines, or a model of the Hugging Face Hub, as NAME."""

    async def work() -> dict[str, Any]:
        async with _loader(store, mesh) as loader:
            loaded = await loader.load(name, path, base_model, in_place=in_place, is_3d_lora_weight=is_3d_lora_weight)
        return {
            "name": loaded.name,
            "base_model": loaded.base_model,
            "digest": loaded.digest,
            "workers": list(loaded.workers),
            "refusals": list(loaded.refusals),
        }

    loaded = run(_in_words(work()))
    if as_json:
        click.echo(json.dumps(loaded, indent=2))
        return
    click.echo(f"{name} is loaded: {loaded['base_model']} on {', '.join(loaded['workers'])}")
    for refusal in loaded["refusals"]:
        click.echo(refusal, err=True)


@command.command("unload")
@click.argument("name")
@store_options
@JSON_OPTION
def unload(name: str, store: str | None, mesh: str, as_json: bool) -> None:
    """Answer no new request by the adapter NAME. Those that run go on to their end."""

    async def work() -> None:
        async with _loader(store, mesh) as loader:
            await loader.unload(name)

    run(_in_words(work()))
    click.echo(json.dumps({"name": name}) if as_json else f"{name} is unloaded")


@command.command("list")
@store_options
@JSON_OPTION
def list_adapters(store: str | None, mesh: str, as_json: bool) -> None:
    """List the adapters, and which instances have them loaded."""

    async def work() -> list[dict[str, Any]]:
        async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
            scheduler = await answering_member(directory, opened, "scheduler", POOLS)
            request = scheduler_pb2.GetSnapshotRequest()
            snapshot = plain(await call(scheduler, scheduler_pb2_grpc.SchedulerStub, "GetSnapshot", request))
            return await gather_adapters(directory, opened, snapshot)

    adapters = run(work())
    if as_json:
        click.echo(json.dumps(adapters, indent=2))
        return
    for adapter in adapters:
        click.echo(adapter_line(adapter))
    if not adapters:
        click.echo(f"no LoRA adapters; load one with `penstock lora load{same_mesh(store, mesh)}`")


async def gather_adapters(directory: Directory, store: StateStore, snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each adapter of the mesh, and where it is, by the snapshot of a scheduler (empty if there is none)."""
    loads = {each["instance_id"]: each.get("load", {}) for each in snapshot.get("instances", ())}
    found = []
    async with _adapters(directory, store) as adapters:
        for name in adapters.names():
            known = adapters.find(name)
            assert known is not None, "it has just been named"
            digest = known.adapter.digest
            found.append(
                {
                    "name": name,
                    "base_model": known.base_model,
                    "path": known.adapter.path,
                    "digest": digest,
                    "started_with": list(known.workers),
                    "conflict": known.conflict,
                    "in_use": [each for each, load in loads.items() if digest in load.get("adapters_in_use", ())],
                    "idle": [each for each, load in loads.items() if digest in load.get("idle_adapters", ())],
                    "refused": [each for each, load in loads.items() if digest in load.get("refused_adapters", ())],
                }
            )
    return found


def adapter_line(adapter: Mapping[str, Any]) -> str:
    """One of `gather_adapters` in words."""
    places = [*(f"{name} (in use)" for name in adapter["in_use"]), *adapter["idle"]]
    line = f"adapter {adapter['name']} of {adapter['base_model']}: loaded on {', '.join(sorted(places)) or 'none'}"
    if adapter["refused"]:
        line += f"; cannot be loaded on {', '.join(adapter['refused'])}"
    return f"{line}; {adapter['conflict']}" if adapter["conflict"] else line


@asynccontextmanager
async def _adapters(directory: Directory, store: StateStore) -> AsyncIterator[AdapterDirectory]:
    """As they are now. Raises StoreUnavailable."""
    adapters = AdapterDirectory(store)
    for member in directory.members("worker"):
        adapters.on_change(MemberChange(ChangeKind.JOINED, member))
    following = asyncio.create_task(adapters.follow())
    try:
        async with asyncio.timeout(HEARD_S):
            while not adapters.is_heard:  # noqa: ASYNC110  once, for some milliseconds
                await asyncio.sleep(0.005)
        yield adapters
    except TimeoutError as error:
        raise StoreUnavailable(f"the state store did not list the adapters within {HEARD_S:g} s") from error
    finally:
        following.cancel()


@asynccontextmanager
async def _loader(store: str | None, mesh: str) -> AsyncIterator[AdapterLoader]:
    async with (
        mesh_store(store, mesh) as opened,
        mesh_directory(opened) as directory,
        _adapters(directory, opened) as adapters,
    ):
        cascades = {entry.key.removeprefix(CASCADES_PREFIX) for entry in (await opened.range(CASCADES_PREFIX)).entries}
        taken = cascades | {member.attributes.get("model", "") for member in directory.members("worker")}
        runtime = system_runtime(AS_OPERATOR)
        yield AdapterLoader(opened, adapters, taken.__contains__, runtime.transport, runtime.clock.unix_s)


async def _in_words(work: Any) -> Any:
    """What the endpoint answers with a status is a sentence here."""
    try:
        return await work
    except ApiError as error:
        raise RpcError(error.message) from error
