"""The tables that `penstock status` prints without --json."""

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.cli.planning.deployments import lines_of_deployment
from services.cli.prediction_status import prediction_lines
from services.cli.rescheduler import order_line
from services.cli.stages import stage_lines

WIDTH_WITHOUT_TERMINAL = 160
SHOWN_ORDERS = 3


def print_status(status: dict[str, Any]) -> None:
    """Print the value of `gather_status` as tables."""
    # A pipe has no width of its own, and a table cut to 80 columns would hide the addresses.
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    console.print(_roles(status["roles"]))
    console.print(_instances(status["instances"]))
    for line in obstacle_lines(status["instances"]):
        console.print(f"[red]{escape(line)}[/]", soft_wrap=True)
    console.print(_policy_line(status["policy"]))
    for unusable in status["policy"].get("unusable", ()):
        console.print(f"[red]policy that cannot be used: {escape(unusable)}[/]", soft_wrap=True)
    for line in _scheduler_lines(status["schedulers"]):
        console.print(line, soft_wrap=True)
    for line in _rescheduler_lines(status["rescheduler"]):
        console.print(line, soft_wrap=True)
    for line in stage_lines(status["stages"], moves=3):
        console.print(escape(line), soft_wrap=True)
    for line in prediction_lines(status["prediction"]):
        console.print(line, soft_wrap=True)
    for deployment in status["deployments"]:
        style = "default" if deployment["is_reached"] else "red"
        for line in lines_of_deployment(deployment):
            console.print(f"[{style}]{escape(line)}[/]", soft_wrap=True)
    for frontend in status["frontends"]:
        console.print(_frontend_line(frontend))


def _roles(roles: list[dict[str, Any]]) -> Table:
    table = Table("role", "member", "health", "gRPC", "metrics", "lease", "leads", title="Roles", title_justify="left")
    for role in roles:
        health = role["health"]
        style = "green" if health == "serving" else "red"
        table.add_row(
            role["role"],
            role["member_id"],
            f"[{style}]{health}[/]",
            role["address"],
            role["metrics_address"],
            role["lease"],
            ", ".join(role["leads"]),
        )
    return table


def _instances(instances: list[dict[str, Any]]) -> Table:
    pools = any(instance.get("pool") for instance in instances)
    columns = (
        "instance",
        "model",
        "engine",
        "phase",
        *(["pool"] if pools else []),
        "state",
        "running",
        "decoding",
        "queued",
        "queued prefill",
        "kv blocks",
        "cached",
    )
    table = Table(*columns, title="Instances", title_justify="left")
    for instance in instances:
        load = instance.get("load", {})
        table.add_row(
            instance["instance_id"],
            instance.get("model", ""),
            instance.get("engine", ""),
            instance.get("phase", ""),
            *([instance.get("pool", "")] if pools else []),
            instance.get("state", ""),
            str(load.get("running_requests", "-")),
            str(load.get("decoding_requests", "-")),
            str(load.get("queued_requests", "-")),
            str(load.get("queued_prefill_tokens", "-")),
            str(load.get("kv_blocks_used", "-")),
            str(instance.get("cached_blocks", "-")),
        )
    return table


def obstacle_lines(instances: list[dict[str, Any]]) -> list[str]:
    """Of each instance that no request can be moved to or from, although its engine could."""
    obstacles = {each["instance_id"]: each.get("load", {}).get("transfer_obstacle", "") for each in instances}
    return [f"{name} cannot move requests: {why}" for name, why in obstacles.items() if why]


def _policy_line(policy: dict[str, Any]) -> str:
    if "error" in policy:
        return f"[red]policy: {policy['error']}[/]"
    if policy["fallback"]:
        stand_in = f"{policy['fallback']} stands in for it: {policy['fallback_reason']}"
        return f"[red]policy: {policy['policy']}, but {stand_in}[/]"
    return f"policy: {policy['policy']} (available: {', '.join(policy['available'])})"


def _scheduler_lines(schedulers: list[dict[str, Any]]) -> list[str]:
    """Of several; the one of most meshes has nothing to say that the policy's line does not."""
    if len(schedulers) < 2:
        return []
    lines = []
    for each in schedulers:
        name = f"scheduler {each['member_id']}"
        if "error" in each:
            lines.append(f"[red]{name}: {escape(each['error'])}[/]")
        elif each["synced"] and each["is_standby"]:
            lines.append(f"{name}: stands by: {each['fallback_reason']}")
        elif not each["synced"] or each["fallback_reason"]:
            lines.append(f"[red]{name}: places by {each['policy']}: {each['fallback_reason'] or 'not synced'}[/]")
        else:
            lines.append(f"{name}: places by {each['policy']} over {each['instances']} instances")
    return lines


def _rescheduler_lines(rescheduler: dict[str, Any]) -> list[str]:
    if "error" in rescheduler:
        return [f"[red]rescheduler: {rescheduler['error']}[/]"]
    mode, orders = rescheduler["mode"], rescheduler["orders"]
    if mode == "off" and not orders:
        return ["rescheduler: off"]
    if rescheduler["fallback"]:
        first = f"[red]rescheduler: {mode}, but {rescheduler['fallback']}: {escape(rescheduler['fallback_reason'])}[/]"
    else:
        first = f"rescheduler: {mode}, {rescheduler['in_flight']} migrations under way"
    return [first, *(f"  {escape(order_line(order))}" for order in orders[:SHOWN_ORDERS])]


def _frontend_line(frontend: dict[str, Any]) -> str:
    if "error" in frontend:
        return f"[red]frontend {frontend['member_id']}: {frontend['error']}[/]"
    line = (
        f"frontend {frontend['member_id']}: http://{frontend['http_address']}, {frontend['active_requests']} running, "
        f"{frontend['queued_requests']} queued, {frontend['requests_total']} in all"
    )
    troubles = [f"placing by {frontend['placement_fallback']}"] if frontend["placement_fallback"] else []
    out = [each["member_id"] for each in frontend["schedulers"] if each["breaker"] != "closed" or not each["connected"]]
    if out:
        troubles.append(f"does not ask {', '.join(out)}")
    if frontend["waiting_requests"]:
        troubles.append(f"{frontend['waiting_requests']} wait for an instance")
    return f"[red]{'; '.join([line, *troubles])}[/]" if troubles else line
