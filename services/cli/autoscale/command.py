"""`penstock autoscale`: how many replicas each model has, and why."""

import json
from typing import Any

import click
import msgspec

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.duties import AUTOSCALE
from controlplane.model.replica_kind import MAX_REPLICAS, ReplicaKind
from mesh.errors import ConfigurationError
from penstock.v1 import autoscale_pb2, autoscale_pb2_grpc
from services.cli.autoscale.kinds_option import kinds_option
from services.cli.autoscale.replay import replay_command
from services.cli.autoscale.shown import autoscale_lines, gather_autoscale
from services.cli.connection import answering_member, call, mesh_directory, mesh_store, run, same_mesh, store_options
from services.cli.finite_range import POSITIVE, FiniteRange

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def command() -> None:
    """Have a model's instances follow its load, or see what that would do."""


@command.command("show")
@store_options
@_JSON
def show(store: str | None, mesh: str, as_json: bool) -> None:
    """Show the models that are scaled: replicas wanted and there, the forecast, and why."""
    _print(run(_asked(store, mesh)), as_json, same_mesh(store, mesh))


@command.command("set")
@click.argument("model")
@click.option("--slo-ttft-ms", "ttft_ms", type=POSITIVE, help="Limit of the SLO; default: none.")
@click.option("--slo-tpot-ms", "tpot_ms", type=POSITIVE, help="Limit of the SLO; default: none.")
@click.option("--slo-e2e-ms", "e2e_ms", type=POSITIVE, help="Limit of the SLO; default: none.")
@click.option(
    "--share", type=FiniteRange(0.5, 0.9999), default=0.99, show_default=True, help="Of requests within the SLO."
)
@click.option(
    "--minimum",
    type=click.IntRange(0, MAX_REPLICAS),
    default=1,
    show_default=True,
    help="Replicas at least; 0: none while nothing comes, and requests wait at the door for the first.",
)
@click.option("--maximum", type=click.IntRange(1, MAX_REPLICAS), default=8, show_default=True, help="Replicas at most.")
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, help="Of one replica.")
@click.option("--price-per-hour", type=FiniteRange(0), default=0.0, show_default=True, help="Of one GPU.")
@click.option("--budget-per-hour", type=FiniteRange(0), help="Of all replicas; default: no bound.")
@click.option("--cold-start-s", type=POSITIVE, help="From the order until a replica serves; default: as measured.")
@click.option(
    "--capacity", "capacity_per_s", type=POSITIVE, help="Requests/s that a replica sustains; default: as seen."
)
@kinds_option
@click.option("--interval-s", type=POSITIVE, default=60.0, show_default=True, help="Between two decisions.")
@click.option(
    "--settle-s", type=FiniteRange(0), default=300.0, show_default=True, help="A replica goes when not needed so long."
)
@click.option("--idle-s", type=POSITIVE, default=600.0, show_default=True, help="With --minimum 0: none after so long.")
@click.option(
    "--quantile",
    type=FiniteRange(0.5, 0.9999),
    default=0.9,
    show_default=True,
    help="Of the forecast's error that capacity is kept for.",
)
@click.option("--dry-run", is_flag=True, help="Decide and show, and change nothing.")
@store_options
@_JSON
def set_policy(store: str | None, mesh: str, as_json: bool, budget_per_hour: float | None, **options: Any) -> None:
    """Scale MODEL so from now on; what was set before is replaced."""
    if budget_per_hour is not None:
        options["budget_per_hour"] = budget_per_hour
    options["kinds"] = tuple(ReplicaKind.read(each) for each in options["kinds"])
    policy = AutoscalePolicy(**options).checked()
    _print(run(_asked(store, mesh, policy=policy)), as_json, same_mesh(store, mesh))


@command.command("remove")
@click.argument("model")
@store_options
@_JSON
def remove(model: str, store: str | None, mesh: str, as_json: bool) -> None:
    """Scale MODEL no more; its replicas stay as they are."""
    _print(run(_asked(store, mesh, removed=model)), as_json, same_mesh(store, mesh))


command.add_command(replay_command)


def _print(models: list[dict[str, Any]], as_json: bool, of_mesh: str) -> None:
    if as_json:
        click.echo(json.dumps(models, indent=2))
        return
    nothing = f"no model is scaled: penstock autoscale set MODEL --slo-ttft-ms N{of_mesh}"
    for line in autoscale_lines(models) or [nothing]:
        click.echo(line)


async def _asked(
    store: str | None, mesh: str, policy: AutoscalePolicy | None = None, removed: str = ""
) -> list[dict[str, Any]]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        planner = await answering_member(directory, opened, "planner", AUTOSCALE)
        stub = autoscale_pb2_grpc.AutoscalerStub
        if policy is not None:
            request = autoscale_pb2.SetAutoscaleRequest(policy_json=msgspec.json.encode(policy).decode())
            await call(planner, stub, "SetAutoscale", request)
        if removed:
            answer = await call(planner, stub, "RemoveAutoscale", autoscale_pb2.RemoveAutoscaleRequest(model=removed))
            if not answer.removed:
                listing = f"penstock autoscale show{same_mesh(store, mesh)}"
                raise ConfigurationError(f"{removed} is not scaled; see {listing}")
        return await gather_autoscale(directory, opened)
