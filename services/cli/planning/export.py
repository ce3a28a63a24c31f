"""A plan as what a deployment is told (pure)."""

import re
from typing import Any, Final

import yaml

from controlplane.planning.cascade.latency import IN_WORDS
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier

FIRST_PORT: Final = 7300
"""Of the planned workers' gRPC ports on the machine; inside its container each takes this one, and the next for its
metrics."""
PLANNED_WORKERS: Final = "planned-workers"
"""The name by which Prometheus finds all of them (deploy/prometheus/prometheus.yml)."""
MAX_NAME: Final = 40
"""Characters of a worker's name in the chart, which puts the release's name before it."""


def compose_override(plan: CascadePlan) -> str:
    """A Compose file beside deploy/compose.yaml: a GPU worker for each replica of the plan, on the machine's
    GPUs from number 0 on, in place of its workers."""
    services: dict[str, Any] = {f"worker-{number}": {"profiles": ["unplanned"]} for number in range(3)}
    port, gpu = FIRST_PORT, 0
    for tier in plan.tiers:
        for replicas in tier.replicas:
            for _ in range(replicas.count):
                name = f"tier-{_plain(tier.model)}-{port - FIRST_PORT}"
                services[name] = _service(tier, replicas, name, port, gpu)
                port += 1
                gpu += replicas.tp * replicas.pp
    return _header(plan) + yaml.safe_dump({"services": services}, sort_keys=False, width=120)


def helm_values(plan: CascadePlan) -> str:
    """Values for the chart deploy/helm/penstock, which runs each entry of `workers` as a StatefulSet."""
    workers = [
        {
            "name": f"tier{number}-tp{replicas.tp}-pp{replicas.pp}-{_plain(tier.model)}"[:MAX_NAME].rstrip("-"),
            "model": tier.model,
            "replicas": replicas.count,
            "gpusPerReplica": replicas.tp * replicas.pp,
            "engineOptions": _engine_options(replicas),
        }
        for number, tier in enumerate(plan.tiers)
        for replicas in tier.replicas
    ]
    cascade = {
        "name": plan.name,
        "tiers": [tier.model for tier in plan.tiers],
        "thresholds": list(plan.thresholds),
    }
    return _header(plan) + yaml.safe_dump({"cascade": cascade, "workers": workers}, sort_keys=False, width=120)


def _service(tier: PlannedTier, replicas: PlannedReplicas, name: str, port: int, first_gpu: int) -> dict[str, Any]:
    options = [part for option in _engine_options(replicas) for part in ("--engine-option", option)]
    # By number: a count of GPUs gives every container the first ones.
    numbers = [str(first_gpu + number) for number in range(replicas.tp * replicas.pp)]
    gpus = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
    return {
        "extends": {"file": "compose.yaml", "service": "worker-gpu"},
        "profiles": [],
        "command": [
            *("serve", "worker", "--member-id", name, "--bind-host", "0.0.0.0"),
            *("--port", str(FIRST_PORT), "--metrics-port", str(FIRST_PORT + 1), "--model", tier.model),
            *("--model-path", f"/models/{tier.model}", *options),
        ],
        "ports": [f"127.0.0.1:{port}:{FIRST_PORT}"],
        "networks": {"default": {"aliases": [PLANNED_WORKERS]}},
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
    }


def _plain(model: str) -> str:
    """A model's name as a part of the name of a host."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


def _engine_options(replicas: PlannedReplicas) -> list[str]:
    options = [f"tensor_parallel={replicas.tp}"] if replicas.tp > 1 else []
    return [*options, *([f"pipeline_parallel={replicas.pp}"] if replicas.pp > 1 else [])]


def _header(plan: CascadePlan) -> str:
    return (
        f"# {plan.name}: quality {plan.quality:.1f}, {IN_WORDS[plan.minimise]} {plan.latency_s:.2f} s expected at "
        f"{plan.rate_per_s:g} requests/s on {plan.gpus} GPUs.\n"
    )
