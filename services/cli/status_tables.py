"""The tables that `penstock status` prints without --json."""

from collections import Counter
from typing import Any

from rich.markup import escape
from rich.table import Table

from services.cli.autoscale.shown import autoscale_lines
from services.cli.lora import adapter_line
from services.cli.planning.deployments import lines_of_deployment
from services.cli.planning.promises import is_broken, promise_line
from services.cli.prediction_status import prediction_lines
from services.cli.rank_status import ranks_table, shape
from services.cli.rescheduler import order_line
from services.cli.stages import stage_lines
from services.cli.terminal_table import fitted, output_console

WIDE = 130
"""Columns that all of a table needs."""
SHOWN_ORDERS = 3


def print_status(status: dict[str, Any], *, clears: bool = False) -> None:
    """Print the value of `gather_status` as tables. `clears`: in the place of what a terminal shows."""
    console = output_console()
    if clears:
        console.clear()
    is_narrow = console.width < WIDE
    console.print(fitted(roles_table(status["roles"], is_narrow=is_narrow), console.width))
    console.print(fitted(instances_table(status["instances"], is_narrow=is_narrow), console.width))
    if (ranks := ranks_table(status["instances"])) is not None:
        console.print(fitted(ranks, console.width))
    for line in obstacle_lines(status["instances"]):
        console.print(f"[red]{escape(line)}[/]", soft_wrap=True)
    for line in pull_lines(status["instances"]):
        console.print(escape(line), soft_wrap=True)
    console.print(_policy_line(status["policy"]))
    for unusable in status["policy"].get("unusable", ()):
        console.print(f"[red]policy that cannot be used: {escape(unusable)}[/]", soft_wrap=True)
    for line in _scheduler_lines(status["schedulers"]):
        console.print(line, soft_wrap=True)
    for line in _rescheduler_lines(status["rescheduler"]):
        console.print(line, soft_wrap=True)
    for line in stage_lines(status["stages"], moves=3):
        console.print(escape(line), soft_wrap=True)
    for adapter in status["adapters"]:
        style = "red" if adapter["conflict"] or adapter["refused"] else "default"
        console.print(f"[{style}]{escape(adapter_line(adapter))}[/]", soft_wrap=True)
    for line in prediction_lines(status["prediction"]):
        console.print(line, soft_wrap=True)
    for deployment in status["deployments"]:
        style = "default" if deployment["is_reached"] else "red"
        for line in lines_of_deployment(deployment):
            console.print(f"[{style}]{escape(line)}[/]", soft_wrap=True)
    for line in autoscale_lines(status["autoscale"]):
        console.print(escape(line), soft_wrap=True)
    for promise in status["promises"]:
        style = "red" if is_broken(promise) else "default"
        console.print(f"[{style}]{escape(promise_line(promise))}[/]", soft_wrap=True)
    for frontend in status["frontends"]:
        console.print(_frontend_line(frontend))
    for gateway in status["gateways"]:
        console.print(_gateway_line(gateway))


def roles_table(roles: list[dict[str, Any]], *, is_narrow: bool) -> Table:
    """Without metrics' addresses, and leases, where it `is_narrow`: `--json` has them."""
    columns = ("role", "member", "health", "gRPC", *(() if is_narrow else ("metrics", "lease")), "leads")
    table = Table(*columns, title="Roles", title_justify="left")
    for role in roles:
        health = role["health"]
        style = "green" if health == "serving" else "red"
        table.add_row(
            role["role"],
            role["member_id"],
            f"[{style}]{escape(health)}[/]",
            role["address"],
            *(() if is_narrow else (role["metrics_address"], role["lease"])),
            ", ".join(role["leads"]),
        )
    return table


def instances_table(instances: list[dict[str, Any]], *, is_narrow: bool) -> Table:
    """Only what is looked at most where it `is_narrow`."""
    spread = any(shape(instance) for instance in instances)
    pools = any(instance.get("pool") for instance in instances)
    hosts, disks = (
        any(int(instance.get(name, 0)) for instance in instances) for name in ("host_blocks", "disk_blocks")
    )
    facts = ("model",) if is_narrow else ("model", "engine", "phase")
    loads = (
        ("running", "running_requests"),
        *(() if is_narrow else (("decoding", "decoding_requests"),)),
        ("queued", "queued_requests"),
        *(() if is_narrow else (("queued prefill", "queued_prefill_tokens"),)),
        ("kv blocks", "kv_blocks_used"),
    )
    hits = [("hits: engine", "engine_hit_tokens_total"), *([("host", "host_hit_tokens_total")] if hosts else [])]
    hits += [("disk", "disk_hit_tokens_total")] if disks else []
    blocks = [("cached", "cached_blocks"), *([("on host", "host_blocks")] if hosts else [])]
    blocks += [("on disk", "disk_blocks")] if disks else []
    hits = [] if is_narrow else hits
    names = (name for name, _ in (*loads, *blocks, *hits))
    columns = ("instance", *facts, *(["ranks"] if spread else []), *(["pool"] if pools else []), "state", *names)
    table = Table(*columns, title="Instances", title_justify="left")
    for instance in instances:
        load = instance.get("load", {})
        table.add_row(
            instance["instance_id"],
            *(instance.get(fact, "") for fact in facts),
            *([shape(instance) or "1"] if spread else []),
            *([instance.get("pool", "")] if pools else []),
            instance.get("state", ""),
            *(str(load.get(field, "-")) for _, field in loads),
            *(str(instance.get(field, "-")) for _, field in blocks),
            *(str(load.get(field, "-")) for _, field in hits),
        )
    return table


def obstacle_lines(instances: list[dict[str, Any]]) -> list[str]:
    """Of each instance that no request can be moved to or from, although its engine could."""
    obstacles = {each["instance_id"]: each.get("load", {}).get("transfer_obstacle", "") for each in instances}
    return [f"{name} cannot move requests: {why}" for name, why in obstacles.items() if why]


def pull_lines(instances: list[dict[str, Any]]) -> list[str]:
    """Of each instance that was to pull cached prefixes from others."""
    lines = []
    for instance in instances:
        pulls = instance.get("load", {}).get("pulls") or {}
        pulled, computed = int(pulls.get("pulled_total", 0)), int(pulls.get("computed_total", 0))
        if pulled or computed:
            tokens = int(pulls["tokens_total"])
            line = f"{instance['instance_id']} pulled {pulled} prefixes ({tokens:,} tokens"
            line += f", {1000 * pulls['token_ms']:.3g} us each)" if pulls["token_ms"] else ")"
            lines.append(line + (f" and computed {computed} that it was to pull" if computed else ""))
    return lines


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
    url = f"{frontend['http_scheme']}://{frontend['http_address']}"
    line = (
        f"frontend {frontend['member_id']}: {url}, {frontend['active_requests']} running, "
        f"{frontend['queued_requests']} queued, {frontend['requests_total']} in all"
    )
    if transports := _transports(frontend):
        line += f", streams by {transports}"
    troubles = _placement_troubles(frontend)
    if frontend["parser_process"] not in ("", "running"):
        troubles.append(f"its parser process is {frontend['parser_process']}")
    if frontend["waiting_requests"]:
        troubles.append(f"{frontend['waiting_requests']} wait for an instance")
    return f"[red]{'; '.join([line, *troubles])}[/]" if troubles else line


def _transports(frontend: dict[str, Any]) -> str:
    """What carries the streams to workers and schedulers, and how many each: `unix 3, grpc 1`; an earlier release does
    not say."""
    counts = Counter(each.get("transport", "") for each in (*frontend["workers"], *frontend["schedulers"]))
    del counts[""]
    return ", ".join(f"{transport} {count}" for transport, count in counts.most_common())


def _gateway_line(gateway: dict[str, Any]) -> str:
    if "error" in gateway:
        return f"[red]gateway {gateway['member_id']}: {gateway['error']}[/]"
    reached = [each for each in gateway["endpoints"] if each["endpoint"]]
    line = (
        f"gateway {gateway['member_id']}: {gateway['address']}, {len(reached)} endpoints, "
        f"{gateway['active_streams']} requests pass, {gateway['requests_total']} in all"
    )
    troubles = _placement_troubles(gateway)
    if unknown := [each["instance_id"] for each in gateway["endpoints"] if not each["endpoint"]]:
        troubles.append(f"does not know the address of {', '.join(unknown)}")
    return f"[red]{'; '.join([line, *troubles])}[/]" if troubles else line


def _placement_troubles(placing: dict[str, Any]) -> list[str]:
    """Of a frontend or a gateway."""
    troubles = [f"placing by {placing['placement_fallback']}"] if placing["placement_fallback"] else []
    out = [each["member_id"] for each in placing["schedulers"] if each["breaker"] != "closed" or not each["connected"]]
    if out:
        troubles.append(f"does not ask {', '.join(out)}")
    return troubles
