"""What the console shows, as values: the page and `penstock top` render them and decide nothing."""

from enum import StrEnum
from typing import Any

import msgspec


class Severity(StrEnum):
    """How loud a fault is."""

    ERROR = "error"
    """Requests fail, wait or are placed blindly."""
    WARNING = "warning"
    """Something stands in for something else, or is about to be missed."""
    NOTE = "note"
    """An operator wanted it so, or it is on its way."""


class Fault(msgspec.Struct, frozen=True):
    """Something that is not as it should be, and what to do about it."""

    severity: Severity
    what: str
    advice: str = ""


class InstanceRow(msgspec.Struct, frozen=True, array_like=True):
    """One instance; on the wire a list, whose columns `COLUMNS` names. -1: not known."""

    instance_id: str
    model: str
    engine: str
    phase: str
    stage: str
    pool: str
    state: str
    running: int
    decoding: int
    queued: int
    queued_prefill_tokens: int
    kv_used_blocks: int
    """Of running requests."""
    kv_cached_blocks: int
    """In the prefix cache, as the scheduler knows it; those that running requests share included."""
    kv_blocks: int
    host_blocks: int
    """That it could load from the memory of its host."""
    engine_hit_tokens: int
    """Of prompts, over its life: found in the engine's prefix cache."""
    host_hit_tokens: int
    """The same: loaded from its host."""
    pulled_tokens: int
    """Of prefixes that it pulled from other instances, over its life."""
    generated_s: float
    """Tokens."""
    prefilled_s: float
    finished_s: float
    """Requests."""
    step_ms: float
    token_interval_ms: float
    cached_share: float
    """Of the prompt tokens of its requests in the window; -1 without any."""
    preemptions: int
    load_age_ms: int
    address: str
    obstacle: str
    """Why no request can be moved to or from it."""


COLUMNS = InstanceRow.__struct_fields__


class Percentiles(msgspec.Struct, frozen=True):
    """Of one measure, in ms; None without a sample."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class ServiceRow(msgspec.Struct, frozen=True):
    """How requests of one model, or of one API key, were served over the window."""

    name: str
    requests: int
    failed: int
    """Ended by an error of the mesh (5xx)."""
    refused: int
    """4xx; a client that left is not among them."""
    requests_s: float
    generated_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    attained: float | None
    """Share of the requests that kept the objectives; one that failed has not. None without any."""
    cached_share: float | None
    moves: int
    recoveries: int


class Totals(msgspec.Struct, frozen=True):
    """Of the whole mesh."""

    instances: int
    ready: int
    running: int
    queued: int
    """At the instances."""
    waiting: int
    """New requests without an instance, at the frontends."""
    admission_queue: int
    requests_s: float
    generated_s: float
    prefilled_s: float
    failed_s: float
    kv_used_blocks: int
    kv_blocks: int
    cached_share: float | None


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A moment of the charts; on the wire a list."""

    at_unix_ms: int
    requests_s: float
    generated_s: float
    prefilled_s: float
    running: int
    queued: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    kv_share: float
    failed_s: float


POINT_COLUMNS = Point.__struct_fields__


class Option(msgspec.Struct, frozen=True):
    """An instance that a request might have gone to; the lowest score wins."""

    instance_id: str
    score: float
    parts: dict[str, float]
    """What the score is made of, in the policy's own names: ..._ms are milliseconds."""
    is_chosen: bool
    excluded: str = ""


class PlacementRow(msgspec.Struct, frozen=True):
    """Where a request went, and why."""

    request_id: str
    at_unix_ms: int
    scheduler: str
    policy: str
    rule: str
    prompt_tokens: int
    chosen: str
    decoded_by: str
    """Another instance than the chosen one; empty: the same."""
    decode_rule: str
    pull: str
    """Whose cached prefix it begins with, and what that saves; empty: nobody's."""
    options: tuple[Option, ...]
    """The best ones."""
    instances: int
    excluded: int


class MoveRow(msgspec.Struct, frozen=True):
    """A migration that the rescheduler ordered."""

    request_id: str
    source: str
    target: str
    reason: str
    at_unix_ms: int
    outcome: str
    """under_way, moved or stayed."""
    message: str
    paused_ms: float
    duration_ms: float


class TierRow(msgspec.Struct, frozen=True):
    """One model of a cascade."""

    model: str
    threshold: float | None
    """None: the last tier."""
    planned_share: float | None
    """Of the requests that reach it, by the plan."""
    share: float | None
    """Of those of the window."""
    answers: int
    """Accepted, in the window."""
    mean_score: float | None
    planned_p95_s: float | None
    p95_s: float | None


class CascadeRow(msgspec.Struct, frozen=True):
    """A cascade: what its plan promises and what came of it."""

    name: str
    tiers: tuple[TierRow, ...]
    judges: tuple[str, ...]
    thresholds_from: str
    promised_quality: float | None
    achieved_quality: float | None
    """Mean score of the accepted answers that were judged."""
    judged: int
    answered: int
    promised_p95_s: float | None
    achieved_p95_s: float | None


class PlanRow(msgspec.Struct, frozen=True):
    """What the planner wants, and what it will do next."""

    cascade: str
    revision: int
    goal: dict[str, Any]
    """As `penstock plan goal` takes it; empty: none."""
    verdict: str
    quality: float | None
    latency_s: float | None
    gpus: int
    replicas: dict[str, int]
    """By model."""
    deployment: tuple[str, ...]
    """What supervisors still lack, and why."""
    promise: str
    """What labelled answers are worth beside the quality that the plan promises, in words; empty: it promises none."""


class ScaleRow(msgspec.Struct, frozen=True):
    """A model whose replicas follow its load: by what, how many it has and needs, and what comes next."""

    model: str
    policy: dict[str, Any]
    """As `penstock autoscale set` takes it, by the names of the record."""
    minimum: int
    maximum: int
    """Within the budget, too."""
    slo: str
    cost: str
    """Of the wanted replicas, in words; empty: no price is known."""
    next: str
    """What the autoscaler does next."""
    decided: bool = False
    """False: nothing of the following is known yet."""
    serving: int = 0
    wanted: int = 0
    rate_per_s: float = 0.0
    """Requests that came, in the last interval."""
    expected_per_s: float = 0.0
    upper_per_s: float = 0.0
    predictor: str = ""
    forecast_error: float = 0.0
    capacity_per_s: float = 0.0
    """Of one replica; 0: not known yet."""
    waiting: int = 0
    kept_share: float | None = None
    """Of the requests that ended in the last interval: within the SLO."""
    why: str = ""
    refused: str = ""
    """Why what is wanted does not come."""
    dry_run: bool = False


class StageRow(msgspec.Struct, frozen=True):
    """A stage of a model: instances that serve a range of lengths."""

    model: str
    number: int
    first_tokens: int
    last_tokens: int
    """0: no bound."""
    instances: int
    obstacle: str


class MemberRow(msgspec.Struct, frozen=True):
    """A process of the control plane, or a frontend."""

    role: str
    member_id: str
    address: str
    health: str
    """serving, or why not."""
    leads: tuple[str, ...]
    detail: str
    """What it does now, in words."""


class RequestRow(msgspec.Struct, frozen=True):
    """A request that runs or has ended; never its texts."""

    request_id: str
    model: str
    frontend: str
    owner: str
    instance: str
    status: int
    """0: it runs."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    age_ms: float
    """Of one that has ended: how long it took."""
    ttft_ms: float | None
    tpot_ms: float | None
    moves: int
    recoveries: int
    tier: str


class EventRow(msgspec.Struct, frozen=True):
    """Something that happened to the mesh."""

    at_unix_ms: int
    what: str
    is_bad: bool = False


class Policy(msgspec.Struct, frozen=True):
    """How requests are placed, and what moves them."""

    name: str
    available: tuple[str, ...]
    parameters: dict[str, float]
    rescheduler: str
    rescheduler_available: tuple[str, ...]
    moved_total: int
    stayed_total: int
    paused_ms_mean: float | None
    """Of the moves that are listed."""


class Body(msgspec.Struct, frozen=True):
    """Everything but the instances and the charts."""

    at_unix_ms: int
    window_s: float
    """What rates of requests, percentiles and shares are of."""
    slo_ttft_ms: float
    slo_tpot_ms: float
    faults: tuple[Fault, ...]
    totals: Totals
    models: tuple[ServiceRow, ...]
    tenants: tuple[ServiceRow, ...]
    policy: Policy | None
    placements: tuple[PlacementRow, ...]
    moves: tuple[MoveRow, ...]
    cascades: tuple[CascadeRow, ...]
    plans: tuple[PlanRow, ...]
    scales: tuple[ScaleRow, ...]
    stages: tuple[StageRow, ...]
    members: tuple[MemberRow, ...]
    requests: tuple[RequestRow, ...]
    running_total: int
    events: tuple[EventRow, ...]


class State(msgspec.Struct, frozen=True):
    """The console at one moment."""

    body: Body
    instances: tuple[InstanceRow, ...]
    """By name."""
    series: tuple[Point, ...]
    """Oldest first; the last one is of this moment."""
