"""What the planner says of the models that are scaled, asked and in words: for `autoscale show` and `status`."""

import json
from typing import Any

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.duties import AUTOSCALE
from controlplane.planning.autoscale.status import AutoscaleStatus, known_fields, next_step
from mesh.errors import RpcError
from mesh.membership import Directory
from mesh.store.interface import StateStore
from penstock.v1 import autoscale_pb2, autoscale_pb2_grpc
from services.cli.connection import answering_member, call


async def gather_autoscale(directory: Directory, store: StateStore) -> list[dict[str, Any]]:
    """The scaled models as the leading planner sees them; none where no planner answers."""
    try:
        planner = await answering_member(directory, store, "planner", AUTOSCALE)
        found = await call(planner, autoscale_pb2_grpc.AutoscalerStub, "ListScaled", autoscale_pb2.ListScaledRequest())
    except RpcError:
        return []
    return [
        {
            "model": each.model,
            "policy": json.loads(each.policy_json),
            "status": json.loads(each.status_json) if each.status_json else None,
        }
        for each in found.models
    ]


def autoscale_lines(models: list[dict[str, Any]]) -> list[str]:
    """A few lines for each model."""
    return [line for each in models for line in _lines(each)]


def _lines(model: dict[str, Any]) -> list[str]:
    policy, status = model["policy"], model["status"]
    bounds = f"{policy.get('minimum', 1)} to {policy.get('maximum', 8)} replicas"
    if status is None:
        return [f"autoscale of {model['model']}: {bounds}, nothing decided yet"]
    is_dry = " (dry run: nothing is changed)" if status.get("dry_run") else ""
    kept = status.get("kept_share")
    lines = [
        f"autoscale of {model['model']}: {status['serving']} of {status['wanted']} replicas serve{is_dry}; "
        f"{status.get('rate_per_s', 0.0):.3g} requests/s, {status.get('expected_per_s', 0.0):.3g} expected, up to "
        f"{status.get('upper_per_s', 0.0):.3g}"
        + (f" (by {status['predictor']}, off by {100 * status.get('forecast_error', 0.0):.0f} %)"
           if status.get("predictor") else "")
        + (f", from {status['history_s'] / 3600:.1f} h of rates" if status.get("history_s") else "")
        + (f"; {100 * kept:.1f} % within the SLO" if kept is not None else ""),
        f"  why: {status.get('why', '')}",
        f"  next: {next_step(known_fields(AutoscalePolicy, policy), known_fields(AutoscaleStatus, status))}",
    ]  # fmt: skip
    if status.get("kinds"):
        mix = " + ".join(str(each) for each in known_fields(AutoscaleStatus, status).kinds)
        lines.insert(1, f"  replicas: {mix}, {status['cost_per_hour']:.4g} an hour")
    if status.get("refused"):
        lines.append(f"  NOT as wanted: {status['refused']}")
    return lines
