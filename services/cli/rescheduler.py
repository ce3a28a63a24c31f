"""`penstock rescheduler [MODE]`: show or switch what moves running requests."""

import json
from typing import Any

import click

from controlplane.model.duties import RESCHEDULER
from controlplane.policies.rescheduling.problem import Idle
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.cli.connection import answering_member, call, mesh_directory, mesh_store, run, store_options
from services.cli.policy import parameters_of
from services.cli.proto_json import plain

SHOWN_ORDERS = 8
IDLE = {
    Idle.BALANCED: "no instance carries so much more than the mean",
    Idle.NO_TARGET: "no instance that carries less may be given a request",
    Idle.NOT_WORTH_IT: "no request runs for long enough, or relieves the others enough, to pay for its move",
    Idle.NO_ROOM: "nobody has room for such a request to its end, or its frontend cannot reach them, or it was there",
    Idle.NO_GAIN: "every move would make the loads more uneven",
}


@click.command()
@click.argument("mode", required=False)
@click.option("--set", "settings", multiple=True, help="A parameter, such as theta=0.2; repeatable.")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(mode: str | None, settings: tuple[str, ...], store: str | None, mesh: str, as_json: bool) -> None:
    """Show what moves running requests between instances, or switch it to MODE: off, current (by the load of the
    moment), predicted (by predicted remaining lengths too) or trajectories (by the time that a move saves everybody).

    Parameters that are not --set have their defaults.
    """
    if settings and mode is None:
        raise click.UsageError("--set needs a MODE: penstock rescheduler MODE --set PARAMETER=NUMBER")
    status = run(_rescheduler(store, mesh, mode, parameters_of(settings)))
    if as_json:
        click.echo(json.dumps(status, indent=2))
        return
    for line in lines(status):
        click.echo(line)


async def _rescheduler(store: str | None, mesh: str, mode: str | None, parameters: dict[str, float]) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        scheduler = await answering_member(directory, opened, "scheduler", RESCHEDULER)
        stub = scheduler_pb2_grpc.SchedulerStub
        if mode is not None:
            request = scheduler_pb2.SetReschedulerRequest(mode=mode, parameters=parameters)
            await call(scheduler, stub, "SetRescheduler", request)
        return plain(await call(scheduler, stub, "GetRescheduler", scheduler_pb2.GetReschedulerRequest()))


def lines(status: dict[str, Any]) -> list[str]:
    """The rescheduler's mode, fallback and balance as lines of text."""
    parameters = "".join(f" {name}={value:g}" for name, value in sorted(status["parameters"].items()))
    text = [f"{status['mode']}{parameters} (available: {', '.join(status['available'])})"]
    if status["fallback"]:
        text.append(f"{status['fallback']} stands in for it: {status['fallback_reason']}")
    if not status["in_charge"]:
        text.append("another scheduler of the mesh moves requests")
    for balance in status["balances"]:
        spread = balance["variance"] ** 0.5
        text.append(
            f"{balance['model']}: {balance['instances']} instances, {balance['mean_tokens']:.0f} tokens each, standard "
            f"deviation {spread:.0f}"
        )
        if balance["idle"]:
            text.append(f"  nothing was moved in the last interval: {IDLE[Idle(balance['idle'])]}")
        text += [f"  excluded: {instance_id} {why}" for instance_id, why in sorted(balance["excluded"].items())]
    return text + [order_line(order) for order in status["orders"][:SHOWN_ORDERS]]


def order_line(order: dict[str, Any]) -> str:
    """One migration order as a line of text: the request, from where to where, its outcome and why it was ordered."""
    outcome = order["outcome"].replace("_", " ")
    line = f"{order['request_id']} from {order['source_instance_id']} to {order['target_instance_id']}: {outcome}"
    if outcome == "moved":
        line += f" in {order['duration_ms']:.0f} ms, paused for {order['paused_ms']:.1f} ms"
    if order["message"]:
        line += f" ({order['message']})"
    return f"{line}; ordered because {order['reason']}"
