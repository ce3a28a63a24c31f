"""A plan as a Compose file or Helm values (pure)."""

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final

import yaml

from controlplane.planning.cascade.latency import IN_WORDS
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier
from mesh.errors import ConfigurationError

FIRST_PORT: Final = 7300
"""Of the planned workers' gRPC ports on the machine; inside its container each takes this one, and the next for its
metrics."""
PLANNED_WORKERS: Final = "planned-workers"
"""The name by which Prometheus finds all of them (deploy/prometheus/prometheus.yml)."""
MAX_NAME: Final = 40
"""Characters of a worker's name in the chart, which puts the release's name before it."""


_LABELLING: Final = ("exact", "model", "endpoint", "preference")
_MEMBER: Final = {
    "PENSTOCK_STORE": "${PENSTOCK_STORE:-etcds://etcd:2379}",
    "PENSTOCK_IDENTITY": "${PENSTOCK_IDENTITY:-/identity}",
}
_HARDENED: Final[dict[str, Any]] = {
    "init": True,
    "read_only": True,
    "tmpfs": ["/tmp"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "logging": {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}},
}
_WORKER: Final[dict[str, Any]] = {
    **_HARDENED,
    "restart": "unless-stopped",
    "tmpfs": ["/tmp:exec", "/home/penstock:exec"],
    "shm_size": "2gb",
    "depends_on": {"etcd": {"condition": "service_healthy"}},
    "stop_grace_period": "40s",
    "image": "penstock/worker-gpu",
    "build": {"context": "..", "dockerfile": "deploy/Dockerfile.worker-gpu"},
    "environment": {**_MEMBER, "PENSTOCK_SERVE_WORKER_ENGINE": "${PENSTOCK_ENGINE:-vllm}"},
    "volumes": ["identity-worker:/identity:ro", "${PENSTOCK_MODELS_DIR:-../demo/models}:/models:ro"],
}
"""The `worker-gpu` of deploy/compose.yaml, whose published port only one service can have, so none extends it."""

_UNSAID: Final = "The plan does not say whose scores its thresholds are for; name that judge by `plan export --judge`."


def judges_for(plan: CascadePlan, named: Sequence[str]) -> tuple[str, ...]:
    """Those of the cascade: as named, else the plan's own; empty where neither is known. Raises `ConfigurationError`
    where the first one is not that of the plan, for whose scores its thresholds are."""
    if not named:
        return (plan.judge,) if plan.judge else ()
    if plan.judge and named[0] != plan.judge:
        raise ConfigurationError(
            f"this plan's thresholds are for the scores of {plan.judge}, which must be the first judge, not {named[0]}"
        )
    return tuple(named)


def compose_override(plan: CascadePlan, judges: Sequence[str] = ()) -> str:
    """A Compose file to go with deploy/compose.yaml: a GPU worker for each replica of the plan, on the machine's
    GPUs from number 0 on, in place of its workers, and a service that sets the cascade up and ends."""
    services: dict[str, Any] = {f"worker-{number}": {"profiles": ["unplanned"]} for number in range(3)}
    port, gpu = FIRST_PORT, 0
    for tier in plan.tiers:
        for replicas in tier.replicas:
            for _ in range(replicas.count):
                name = f"tier-{_plain(tier.model)}-{port - FIRST_PORT}"
                services[name] = _service(tier, replicas, name, port, gpu)
                port += 1
                gpu += replicas.tp * replicas.pp
    services["cascade-set"] = _setting_up(plan, judges)
    story = (
        "docker compose -f deploy/compose.yaml -f THIS_FILE up",
        f"`cascade-set` sets {plan.name} up at every start, and so takes back what was set or planned since.",
        f"Its judges: {', '.join(judges)}." if judges else f"{_UNSAID} `cascade-set` leaves it at confidence.",
    )
    return _header(plan, *story) + yaml.safe_dump({"services": services}, sort_keys=False, width=120)


def helm_values(plan: CascadePlan, judges: Sequence[str] = ()) -> str:
    """Values for the chart deploy/helm/penstock, which runs each entry of `workers` as a StatefulSet and sets
    `cascade` up by a Job."""
    workers = [
        {
            "name": f"tier{number}-tp{replicas.tp}-pp{replicas.pp}-{_plain(tier.model)}"[:MAX_NAME].rstrip("-"),
            "model": tier.model,
            "replicas": replicas.count,
            "gpusPerReplica": replicas.tp * replicas.pp,
            "engineArgs": _engine_args(replicas),
        }
        for number, tier in enumerate(plan.tiers)
        for replicas in tier.replicas
    ]
    cascade = {
        "name": plan.name,
        "tiers": [tier.model for tier in plan.tiers],
        "thresholds": list(plan.thresholds),
        **({"judges": list(judges)} if judges else {}),
        **({"label": label} if (label := _label_of(plan)) else {}),
    }
    story = (
        "helm upgrade --install penstock deploy/helm/penstock -f THIS_FILE",
        f"A Job sets {plan.name} up whenever what it sets has changed here.",
        *([] if judges else [f"{_UNSAID} The chart's `cascade.judges` stay as they are."]),
    )
    return _header(plan, *story) + yaml.safe_dump({"cascade": cascade, "workers": workers}, sort_keys=False, width=120)


def _label_of(plan: CascadePlan) -> str:
    """The judge that labelled the samples of the plan and can go on with it; empty: none did, or people did."""
    label = "" if plan.promise is None else plan.promise.label
    return label if label != plan.judge and label.partition(":")[0] in _LABELLING else ""


def _setting_up(plan: CascadePlan, judges: Sequence[str]) -> dict[str, Any]:
    """What the chart's Job does: `penstock cascade set`, until the cascade router is there."""
    options = [f"--tier={tier.model}" for tier in plan.tiers]
    options += [f"--threshold={threshold}" for threshold in plan.thresholds]
    options += [f"--judge={judge}" for judge in judges]
    options += [f"--label={label}"] if (label := _label_of(plan)) else []
    return {
        **deepcopy(_HARDENED),
        "image": "penstock/controlplane",
        "command": [part.replace("$", "$$") for part in ("cascade", "set", *options, "--", plan.name)],
        "environment": dict(_MEMBER),
        "volumes": ["identity-operator:/identity:ro"],
        "depends_on": {"cascade": {"condition": "service_healthy"}},
        "restart": "on-failure:30",
    }


def _service(tier: PlannedTier, replicas: PlannedReplicas, name: str, port: int, first_gpu: int) -> dict[str, Any]:
    options = [part for option in _engine_args(replicas) for part in ("--engine-arg", option)]
    # By number: a count of GPUs gives every container the first ones.
    numbers = [str(first_gpu + number) for number in range(replicas.tp * replicas.pp)]
    gpus = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
    return {
        **deepcopy(_WORKER),  # YAML would refer from one to the other
        "command": [
            *("serve", "worker", "--member-id", name, "--bind-host", "0.0.0.0"),
            *("--port", str(FIRST_PORT), "--metrics-port", str(FIRST_PORT + 1), "--model", tier.model),
            *("--model-path", f"/models/{tier.model}", *options),
        ],
        "ports": [f"127.0.0.1:{port}:{FIRST_PORT}"],
        "healthcheck": _ready(FIRST_PORT + 1),
        "networks": {"default": {"aliases": [PLANNED_WORKERS]}},
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
    }


def _ready(metrics_port: int) -> dict[str, Any]:
    look = (
        f"import socket; c = socket.create_connection(('127.0.0.1', {metrics_port}), 5); "
        "c.send(b'GET /ready HTTP/1.0\\r\\n\\r\\n'); raise SystemExit(b' 200 ' not in c.recv(32))"
    )
    test = ["CMD", "python", "-ISc", look]
    return {"interval": "5s", "timeout": "10s", "retries": 3, "start_period": "1800s", "test": test}


def _plain(model: str) -> str:
    """A model's name as a part of the name of a host."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


def _engine_args(replicas: PlannedReplicas) -> list[str]:
    options = [f"tensor_parallel_size={replicas.tp}"] if replicas.tp > 1 else []
    return [*options, *([f"pipeline_parallel_size={replicas.pp}"] if replicas.pp > 1 else [])]


def _header(plan: CascadePlan, *story: str) -> str:
    expected = (
        f"{plan.name}: quality {plan.quality:.1f}, {IN_WORDS[plan.minimise]} {plan.latency_s:.2f} s expected at "
        f"{plan.rate_per_s:g} requests/s on {plan.gpus} GPUs."
    )
    return "".join(f"# {line}\n" for line in (expected, *story))
