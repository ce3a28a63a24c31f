"""Who may call what, and who may write which keys. What is not named here is refused.

The table is by method, since one port serves all services of a process. `penstock ca doors` prints it.
"""

from typing import Final

from mesh.identity.identity import ROLES, Identity

_PACKAGE: Final = "/penstock.v1."
_EVERYBODY: Final = frozenset(ROLES)
_MEMBERS: Final = _EVERYBODY - {"envoy"}
_READERS: Final = frozenset({"frontend", "gateway", "scheduler", "monitor", "planner", "cascade"})
"""Of what is under way: consoles and control roles."""


def _roles(*names: str) -> frozenset[str]:
    return frozenset(names)


_OPERATOR: Final = _roles("operator")
"""Nobody else."""
_WORKER: Final = _roles("worker")
_FRONTEND: Final = _roles("frontend")
_PLACED_FOR: Final = _roles("frontend", "gateway")

SERVICES: Final[dict[str, dict[str, frozenset[str]]]] = {
    "Worker": {
        "Stream": _FRONTEND,
        "Describe": _READERS | _WORKER,
        "GetLoad": _READERS | _WORKER,
        "ListRequests": _READERS,
        "Drain": _OPERATOR,
        "WatchSteps": _OPERATOR,
        "GetTextFiles": _PLACED_FOR,
        "Pool": _FRONTEND,
        "ExpandMedia": _FRONTEND,
        "LoadAdapter": _FRONTEND,
        "UnloadAdapter": _FRONTEND,
        "Migrate": _roles("scheduler"),
    },
    "Migration": {"Exchange": _WORKER},
    "PrefixPull": {"Hold": _WORKER},
    "KvTransfer": {"Describe": _WORKER, "Pull": _WORKER, "Status": _READERS | _WORKER},
    "Stages": {"Tell": _WORKER, "GetLengths": _roles("planner")},
    "Monitor": {"Report": _WORKER, "Watch": _roles("scheduler"), "GetCluster": _READERS},
    "Scheduler": {
        "Place": _PLACED_FOR,
        "PlaceStream": _PLACED_FOR,
        "Ready": _PLACED_FOR,
        "Share": _roles("scheduler"),
        "PlaceDecode": _WORKER,
        "Explain": _READERS,
        "ListPlacements": _READERS,
        "GetPolicy": _READERS,
        "SetPolicy": _OPERATOR,
        "GetRescheduler": _READERS,
        "SetRescheduler": _OPERATOR,
        "GetSnapshot": _READERS,
    },
    "Frontend": {
        "GetStatus": _READERS,
        "ListRequests": _READERS,
        "ListEnded": _READERS,
        "KeepResponse": _FRONTEND,
        "FindResponse": _FRONTEND,
        "DropResponse": _FRONTEND,
        "EntrustResponse": _FRONTEND,
        "FollowResponse": _FRONTEND,
        "CancelResponse": _FRONTEND,
        "ShareUse": _FRONTEND,
    },
    "Gateway": {"GetStatus": _READERS},
    "LengthPredictor": {"Predict": _WORKER, "GetArtefact": _READERS | _WORKER},
    "LengthPrediction": {"GetState": _READERS},
    "StagePlanner": {"GetStages": _READERS, "PlanStages": _OPERATOR, "SetStages": _OPERATOR},
    "Planner": {
        "GetPlan": _READERS,
        "ListPlans": _READERS,
        "ReportWorkload": _roles("cascade"),
        "SetGoal": _OPERATOR,
        "ApplyPlan": _OPERATOR,
        "RemoveGoal": _OPERATOR,
    },
    "Autoscaler": {"ListScaled": _READERS, "SetAutoscale": _OPERATOR, "RemoveAutoscale": _OPERATOR},
    "Cascade": {
        "Judge": _FRONTEND,
        "GetThresholds": _READERS,
        "ListCascades": _READERS,
        "ExportSamples": _OPERATOR,
        "SetCascade": _OPERATOR,
        "RemoveCascade": _OPERATOR,
    },
    "Member": {"Restart": _OPERATOR, "GetMetrics": _READERS},
    # Tickets say who has come; the stream itself, and each unary call on one, is asked at the door of its method.
    "Frames": {"Open": _MEMBERS, "Call": _MEMBERS},
    # Keys have rules of their own, `may_write`.
    "State": dict.fromkeys(
        ("Range", "Put", "CompareAndSwap", "Delete", "GrantLease", "RefreshLease", "RevokeLease", "Watch"), _MEMBERS
    ),
}
"""By service and method: the roles that may call it; operators may besides."""

DOORS: Final[dict[str, frozenset[str]]] = {
    f"{_PACKAGE}{service}/{method}": roles for service, methods in SERVICES.items() for method, roles in methods.items()
} | {
    "/envoy.service.ext_proc.v3.ExternalProcessor/Process": _roles("envoy"),
    "/grpc.health.v1.Health/Check": _EVERYBODY,
    "/grpc.health.v1.Health/Watch": _EVERYBODY,
    "/grpc.health.v1.Health/List": _EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _OPERATOR,
}
"""By a method's whole path."""

MEMBERS: Final = "/penstock/members/"
AUDIT: Final = "/penstock/audit/"
KEYS: Final[dict[str, frozenset[str]]] = {
    "/penstock/leaders/": _roles("scheduler", "planner"),
    "/penstock/epochs/": _roles("scheduler", "planner"),
    "/penstock/config/policy": _roles("scheduler"),
    "/penstock/config/rescheduler": _roles("scheduler"),
    "/penstock/config/stages": _roles("planner"),
    "/penstock/stages/layout/": _roles("planner"),
    "/penstock/stages/boundary/": _roles("worker", "planner"),
    "/penstock/pools/": _roles("scheduler"),
    "/penstock/cascades/": _roles("cascade", "planner"),
    "/penstock/goals/": _roles("planner"),
    "/penstock/plans/": _roles("planner"),
    "/penstock/autoscale/": _roles("planner"),
    "/penstock/adapters/": _roles("frontend"),
    "/penstock/budgets/": _roles("frontend"),
}
"""By the beginning of a key: who may write it besides operators, who may write all. Members and the audit log: see
`may_write`."""


def may_call(identity: Identity, method: str) -> bool:
    """Whether this door is open to somebody. Operators may call all that the table names; what it does not is open to
    nobody."""
    return method in DOORS and (identity.role == "operator" or identity.role in DOORS[method])


def may_write(identity: Identity, key: str) -> bool:
    """Whether somebody may write or delete a key of the state store, or all that begin so.

    A member writes its own record: one of its role, and of its name if its certificate has one. What a role was
    ordered, members of that role write.
    """
    if identity.role == "operator":
        return True
    if key.startswith(AUDIT):
        return key.startswith(f"{AUDIT}{identity.role}/")
    if key.startswith(MEMBERS):
        role, _, name = key.removeprefix(MEMBERS).partition("/")
        return role == identity.role and identity.name in ("", name)
    return any(key.startswith(prefix) and identity.role in roles for prefix, roles in KEYS.items())
