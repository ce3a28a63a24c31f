"""Makes what the console shows of one look after another. Pure: all that it knows of time is what looks bear."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from controlplane.planning.cascade.plan import CascadePlan, decode_plan
from mesh.errors import ConfigurationError
from mesh.membership import Member
from penstock.v1 import frontend_pb2, scheduler_pb2, stages_pb2, worker_pb2
from services.frontend.console.cascades import cascade_rows, promised
from services.frontend.console.collector import Look, Unanswered
from services.frontend.console.faults import faults
from services.frontend.console.requests import placement_rows, request_rows
from services.frontend.console.scales import scale_events, scale_rows
from services.frontend.console.state import (
    Body,
    EventRow,
    InstanceRow,
    MemberRow,
    MoveRow,
    PlanRow,
    Point,
    Policy,
    ScaleRow,
    ServiceRow,
    StageRow,
    State,
    Totals,
)
from services.frontend.console.window import (
    WINDOW_S,
    EndedAt,
    EndedWindow,
    LoadRates,
    Objectives,
    Rates,
    cached_share,
    percentiles,
    service_row,
    tpot_ms,
    ttft_ms,
)

AGE_STEP_MS: Final = 500
"""Ages of loads are told in such steps: told to the millisecond, no row would ever stay as it is."""
MAX_POINTS: Final = 300
MAX_EVENTS: Final = 100
SHOWN_MOVES: Final = 20
KEPT_PER_S: Final = 4000
"""Service is computed anew at most every second for so many requests of the window: 20,000 of them take 60 ms."""
POINT_SPAN_S: Final = 10.0
"""What the percentiles of one point of the charts are of."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Service:
    """How the requests of the window were served, as of some moment."""

    at_unix_ms: float = float("-inf")
    models: tuple[ServiceRow, ...] = ()
    tenants: tuple[ServiceRow, ...] = ()
    cached_shares: Mapping[str, float] = field(default_factory=dict)
    """Of prompt tokens, by instance."""


@dataclass(slots=True)
class View:
    """What is remembered from one look to the next."""

    objectives: Objectives
    _window: EndedWindow = field(default_factory=EndedWindow)
    _rates: LoadRates = field(default_factory=LoadRates)
    _service: _Service = _Service()
    _series: deque[Point] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    _events: deque[EventRow] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _members: dict[tuple[str, str], Member] | None = None
    _state_of: dict[str, str] = field(default_factory=dict)
    _wanted: dict[str, int] = field(default_factory=dict)
    """Replicas of models that are scaled."""

    def add(self, look: Look) -> State:
        """What is to be shown now. Looks come in the order of their times."""
        at = look.at_unix_ms
        self._window.add(at, _ended(look))
        span_s = self._window.span_s(at)
        if at - self._service.at_unix_ms >= 1000 * (len(self._window.kept) // KEPT_PER_S):
            self._service = self._served(at, span_s)
        instances = self._instances(look)
        scales = scale_rows(look)
        self._note_events(look, instances)
        self._note_scales(at, scales)
        everything = [each.request for each in self._window.kept]
        totals = _totals(look, instances, [each.request for each in self._window.since(at - 1000 * POINT_SPAN_S)])
        self._series.append(self._point(at, totals))
        plans = _plans(look)
        body = Body(
            at_unix_ms=at,
            window_s=round(min(WINDOW_S, span_s), 1),
            slo_ttft_ms=self.objectives.ttft_ms,
            slo_tpot_ms=self.objectives.tpot_ms,
            faults=faults(look, instances, scales),
            totals=totals,
            models=self._service.models,
            tenants=self._service.tenants,
            policy=_policy(look),
            placements=placement_rows(look),
            moves=_moves(look),
            cascades=cascade_rows(look, plans, everything),
            plans=tuple(_plan_rows(look, plans)),
            scales=scales,
            stages=tuple(_stage_rows(look)),
            members=tuple(_member_rows(look)),
            requests=request_rows(look, self._window.kept),
            running_total=sum(len(answer.requests) for answer in _answered(look.running)),
            events=tuple(reversed(self._events)),
        )
        return State(body, instances, tuple(self._series))

    def _served(self, at_unix_ms: int, span_s: float) -> _Service:
        def rows(key: Callable[[frontend_pb2.EndedRequest], str]) -> Iterator[ServiceRow]:
            for name, requests in self._window.by(key).items():
                yield service_row(name, requests, span_s, self.objectives)

        shares = (
            (name, cached_share(requests))
            for name, requests in self._window.by(lambda request: request.instance_id).items()
        )
        return _Service(
            at_unix_ms,
            models=tuple(rows(lambda request: request.model)),
            tenants=tuple(row for row in rows(lambda request: request.owner) if row.name),
            cached_shares={name: share for name, share in shares if share is not None},
        )

    def _instances(self, look: Look) -> tuple[InstanceRow, ...]:
        snapshot = (
            {}
            if isinstance(look.snapshot, Unanswered)
            else {each.instance_id: each for each in look.snapshot.instances}
        )
        monitored = (
            {}
            if isinstance(look.cluster, Unanswered)
            else {each.instance.instance_id: each for each in look.cluster.instances}
        )
        rates = self._rates.add(
            look.at_unix_ms,
            ((name, each.instance.incarnation_id, each.load) for name, each in monitored.items()),
        )
        stages, rows = _stage_of(look), []
        workers = {member.member_id: member for member in look.members if member.role == "worker"}
        for name in sorted(workers.keys() | snapshot.keys()):
            seen, known, member = snapshot.get(name), monitored.get(name), workers.get(name)
            attributes = {} if member is None else member.attributes
            load = seen.load if seen is not None else known.load if known is not None else worker_pb2.LoadReport()
            rate = rates.get(name, Rates())
            rows.append(
                InstanceRow(
                    instance_id=name,
                    model=attributes.get("model", "" if seen is None else seen.model),
                    engine=attributes.get("engine", ""),
                    phase=attributes.get("phase", "" if seen is None else seen.phase),
                    stage=stages.get(name, ""),
                    pool="" if seen is None else seen.pool,
                    state=_state(look, seen, known is not None),
                    running=load.running_requests,
                    decoding=load.decoding_requests,
                    queued=load.queued_requests,
                    queued_prefill_tokens=load.queued_prefill_tokens,
                    kv_used_blocks=load.kv_blocks_used,
                    kv_cached_blocks=seen.cached_blocks if seen is not None else -1,
                    kv_blocks=known.instance.kv_blocks if known is not None else -1,
                    host_blocks=seen.host_blocks if seen is not None else -1,
                    engine_hit_tokens=load.engine_hit_tokens_total,
                    host_hit_tokens=load.host_hit_tokens_total,
                    pulled_tokens=load.pulls.tokens_total,
                    generated_s=rate.generated_s,
                    prefilled_s=rate.prefilled_s,
                    finished_s=rate.finished_s,
                    step_ms=round(load.step_ms, 2),
                    token_interval_ms=round(load.token_interval_ms, 2),
                    cached_share=self._service.cached_shares.get(name, -1.0),
                    preemptions=load.preemptions_total,
                    load_age_ms=known.load_age_ms // AGE_STEP_MS * AGE_STEP_MS if known is not None else -1,
                    address=member.address if member is not None else "" if seen is None else seen.address,
                    obstacle=load.transfer_obstacle,
                )
            )
        return tuple(rows)

    def _note_events(self, look: Look, instances: Iterable[InstanceRow]) -> None:
        at, members = look.at_unix_ms, {(each.role, each.member_id): each for each in look.members}
        before, self._members = self._members, members
        states_before, self._state_of = self._state_of, {row.instance_id: row.state for row in instances}
        if before is None:
            return
        for key in sorted(before.keys() - members.keys()):
            self._events.append(EventRow(at, f"{' '.join(key)} has left", is_bad=True))
        for key in sorted(members.keys() - before.keys()):
            self._events.append(EventRow(at, f"{' '.join(key)} has joined"))
        for key in sorted(members.keys() & before.keys()):
            if members[key].incarnation_id != before[key].incarnation_id:
                self._events.append(EventRow(at, f"{' '.join(key)} was started again"))
        for name, state in self._state_of.items():
            former = states_before.get(name)
            if former is not None and former != state:
                self._events.append(EventRow(at, f"{name} was {former} and is {state}", is_bad=state == "stale"))

    def _note_scales(self, at_unix_ms: int, scales: tuple[ScaleRow, ...]) -> None:
        self._events.extend(scale_events(at_unix_ms, self._wanted, scales))
        self._wanted |= {row.model: row.wanted for row in scales if row.decided}

    def _point(self, at_unix_ms: int, totals: Totals) -> Point:
        lately = [each.request for each in self._window.since(at_unix_ms - 1000 * POINT_SPAN_S)]
        ttft = percentiles([value for each in lately if (value := ttft_ms(each)) is not None])
        tpot = percentiles([value for each in lately if (value := tpot_ms(each)) is not None])
        return Point(
            at_unix_ms,
            totals.requests_s,
            totals.generated_s,
            totals.prefilled_s,
            totals.running,
            totals.queued + totals.waiting,
            ttft.p50,
            ttft.p95,
            tpot.p50,
            tpot.p95,
            round(totals.kv_used_blocks / totals.kv_blocks, 4) if totals.kv_blocks else 0.0,
            totals.failed_s,
        )


def _answered(answers: Mapping[str, Answer | Unanswered]) -> Iterator[Answer]:
    return (answer for answer in answers.values() if not isinstance(answer, Unanswered))


def _ended(look: Look) -> list[EndedAt]:
    return [
        EndedAt(frontend, request)
        for frontend, answer in look.ended.items()
        if not isinstance(answer, Unanswered)
        for request in answer.requests
    ]


def _state(look: Look, seen: scheduler_pb2.SnapshotInstance | None, is_monitored: bool) -> str:
    if seen is not None:
        return str(seen.state)
    if isinstance(look.snapshot, Unanswered):  # nothing is known of placement, which is said elsewhere
        return "monitored" if is_monitored else "unknown"
    return "not in the snapshot"


def _totals(look: Look, instances: tuple[InstanceRow, ...], lately: list[frontend_pb2.EndedRequest]) -> Totals:
    """`lately`: what ended within the last `POINT_SPAN_S`."""
    frontends: list[frontend_pb2.GetFrontendStatusResponse] = list(_answered(look.frontends))
    share = cached_share(lately)
    return Totals(
        instances=len(instances),
        ready=sum(row.state == "ready" for row in instances),
        running=sum(row.running for row in instances),
        queued=sum(row.queued for row in instances),
        waiting=sum(each.waiting_requests for each in frontends),
        admission_queue=sum(each.queued_requests for each in frontends),
        requests_s=round(len(lately) / POINT_SPAN_S, 2),
        generated_s=round(sum(max(0.0, row.generated_s) for row in instances), 1),
        prefilled_s=round(sum(max(0.0, row.prefilled_s) for row in instances), 1),
        failed_s=round(sum(each.status >= 500 for each in lately) / POINT_SPAN_S, 2),
        kv_used_blocks=sum(row.kv_used_blocks for row in instances),
        kv_blocks=sum(max(0, row.kv_blocks) for row in instances),
        cached_share=share,
    )


def _policy(look: Look) -> Policy | None:
    policies = list(_answered(look.policies))
    if not policies:
        return None
    in_force = next((each for each in policies if not each.is_standby), policies[0])
    reschedulers = sorted(_answered(look.reschedulers), key=lambda each: not each.in_charge)
    moved = [move for move in _moves(look) if move.outcome == "moved"]
    return Policy(
        name=in_force.policy,
        available=tuple(in_force.available),
        parameters=dict(in_force.parameters),
        rescheduler=reschedulers[0].mode if reschedulers else "",
        rescheduler_available=tuple(reschedulers[0].available) if reschedulers else (),
        moved_total=sum(each.moved_total for each in reschedulers),
        stayed_total=sum(each.stayed_total for each in reschedulers),
        paused_ms_mean=round(sum(move.paused_ms for move in moved) / len(moved), 2) if moved else None,
    )


def _moves(look: Look) -> tuple[MoveRow, ...]:
    orders = [order for answer in _answered(look.reschedulers) for order in answer.orders]
    latest = sorted(orders, key=lambda order: -order.ordered_unix_ms)[:SHOWN_MOVES]
    return tuple(move_row(order) for order in latest)


def move_row(order: scheduler_pb2.ReschedulerOrder) -> MoveRow:
    """One order, as it is shown."""
    return MoveRow(
        request_id=order.request_id,
        source=order.source_instance_id,
        target=order.target_instance_id,
        reason=order.reason,
        at_unix_ms=order.ordered_unix_ms,
        outcome=scheduler_pb2.OrderOutcome.Name(order.outcome).removeprefix("ORDER_OUTCOME_").lower(),
        message=order.message,
        paused_ms=round(order.paused_ms, 2),
        duration_ms=round(order.duration_ms, 1),
    )


def _plans(look: Look) -> dict[str, CascadePlan]:
    """Those in force, by cascade; one that cannot be read is left out."""
    plans: dict[str, CascadePlan] = {}
    for status in () if isinstance(look.plans, Unanswered) else look.plans.plans:
        try:
            if status.plan_json:
                plans[status.cascade] = decode_plan(status.plan_json.encode())
        except ConfigurationError:
            continue  # written by another release; the planner's verdict says what it makes of it
    return plans


def _plan_rows(look: Look, plans: Mapping[str, CascadePlan]) -> Iterator[PlanRow]:
    deployments = () if isinstance(look.deployments, Unanswered) else look.deployments
    for status in () if isinstance(look.plans, Unanswered) else look.plans.plans:
        plan = plans.get(status.cascade)
        lacking = [
            f"{each.supervisor} lacks {missing.count} {missing.model}: {missing.why}"
            for each in deployments
            if status.cascade in each.plans
            for missing in each.missing
        ]
        yield PlanRow(
            cascade=status.cascade,
            revision=status.revision,
            goal=_goal(status.goal) if status.HasField("goal") else {},
            verdict=status.verdict,
            quality=None if plan is None else round(plan.quality, 2),
            latency_s=None if plan is None else round(plan.latency_s, 3),
            gpus=0 if plan is None else plan.gpus,
            replicas={} if plan is None else {tier.model: tier.replica_count for tier in plan.tiers},
            deployment=tuple(lacking),
            promise="" if (quality := promised(status)) is None else quality.says(),
        )


def _goal(goal: Any) -> dict[str, Any]:
    limits = {name: getattr(goal, name) for name in ("quality", "latency_s") if goal.HasField(name)}
    return {"gpus": goal.gpus, "tiers": list(goal.tiers), "replan": goal.replan, **limits}


def _models(look: Look) -> Iterable[stages_pb2.ModelStages]:
    return () if isinstance(look.stages, Unanswered) or not look.stages.enabled else look.stages.models


def _stage_of(look: Look) -> dict[str, str]:
    return {
        instance.instance_id: str(number)
        for model in _models(look)
        for number, stage in enumerate(model.stages, 1)
        for instance in stage.instances
    }


def _stage_rows(look: Look) -> Iterator[StageRow]:
    for model in _models(look):
        if not model.stages:
            yield StageRow(model.model, 0, 0, 0, 0, model.obstacle)
        for number, stage in enumerate(model.stages, 1):
            alive = sum(instance.alive for instance in stage.instances)
            yield StageRow(model.model, number, stage.first_tokens, stage.last_tokens, alive, model.obstacle)


def _member_rows(look: Look) -> Iterator[MemberRow]:
    leading: dict[str, list[str]] = {}
    for duty, record in sorted(({} if isinstance(look.leaders, Unanswered) else look.leaders).items()):
        leading.setdefault(record.incarnation_id, []).append(duty)
    for member in look.members:
        if member.role != "worker":
            health = look.unwell.get(f"{member.role}/{member.member_id}", "")
            detail = ""
            if member.role == "scheduler":
                health, detail = _scheduler_detail(look.policies[member.member_id])
            elif member.role == "frontend":
                health, detail = _frontend_detail(look.frontends[member.member_id])
            leads = tuple(leading.get(member.incarnation_id, ()))
            yield MemberRow(member.role, member.member_id, member.address, health or "serving", leads, detail)


def _scheduler_detail(policy: scheduler_pb2.GetPolicyResponse | Unanswered) -> tuple[str, str]:
    if isinstance(policy, Unanswered):
        return policy.why, ""
    stands_by = f"stands by: {policy.fallback_reason}" if policy.is_standby else ""
    return "", stands_by or f"places by {policy.fallback or policy.policy}"


def _frontend_detail(status: frontend_pb2.GetFrontendStatusResponse | Unanswered) -> tuple[str, str]:
    if isinstance(status, Unanswered):
        return status.why, ""
    running = f"{status.active_requests} running, {status.queued_requests} queued, {status.requests_total} in all"
    return "", f"http://{status.http_address}, {running}"
