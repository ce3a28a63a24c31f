"""What the console shows of the looks that it takes."""

import json
from typing import Any

import msgspec
import pytest

from controlplane.deployment.deployment_status import DeploymentStatus, MissingReplicas
from penstock.v1 import autoscale_pb2, cascade_pb2, frontend_pb2, planner_pb2, scheduler_pb2, stages_pb2
from services.frontend.console.collector import Unanswered
from services.frontend.console.state import Percentiles, Severity, State
from services.frontend.console.view import KEPT_PER_S, MAX_POINTS, View
from services.frontend.console.window import WINDOW_S, Objectives
from tests.unit.services.frontend.console.looks import CONTROL, START_UNIX_MS, ended, load, look, member, worker


def view() -> View:
    return View(Objectives(ttft_ms=150.0, tpot_ms=20.0))


def whats(state: State, severity: Severity | None = None) -> list[str]:
    return [each.what for each in state.body.faults if severity in (None, each.severity)]


def test_a_mesh_that_is_well_has_no_faults() -> None:
    state = view().add(look())
    assert state.body.faults == ()
    assert [row.instance_id for row in state.instances] == ["w0000", "w0001"]
    assert {row.state for row in state.instances} == {"ready"}
    assert (state.body.totals.instances, state.body.totals.ready) == (2, 2)
    assert {row.health for row in state.body.members} == {"serving"}


def test_rates_come_from_counters_of_one_incarnation() -> None:
    shown = view()
    first = shown.add(look(loads=[load(generated_tokens_total=100), load(generated_tokens_total=0)]))
    assert {row.generated_s for row in first.instances} == {-1.0}, "nothing to compare with"
    again = worker(1, "second")
    loads = [load(generated_tokens_total=350, prefilled_tokens_total=10), load(generated_tokens_total=5)]
    state = shown.add(look(seconds=2, workers=[worker(0), again], loads=loads))
    assert [row.generated_s for row in state.instances] == [125.0, -1.0], "a new incarnation counts anew"
    assert state.body.totals.generated_s == 125.0


def test_percentiles_and_objectives_by_model_and_key() -> None:
    requests = [
        *(ended(number, first_token_ms=float(number), owner="team-a") for number in range(1, 101)),
        ended(101, model="other", first_token_ms=400.0, ended_ms=410.0),
        ended(102, model="other", status=503, owner="team-b"),
        ended(103, model="other", status=429),
        ended(104, model="other", status=499),
    ]
    body = view().add(look(requests=requests)).body
    models = {row.name: row for row in body.models}
    assert models["m"].ttft_ms == Percentiles(50.0, 95.0, 99.0)
    assert models["m"].attained == 1.0
    assert models["m"].cached_share == 0.4
    assert (models["other"].failed, models["other"].refused) == (1, 1), "a client that left is neither"
    assert models["other"].attained == 0.0, "late and failed"
    assert [row.name for row in body.tenants] == ["team-a", "team-b"], "who has no key is no tenant"


def test_the_time_between_tokens_is_that_of_each_choice() -> None:
    body = view().add(look(requests=[ended(1, generated_tokens=22, choices=2), ended(2, generated_tokens=1)])).body
    assert body.models[0].tpot_ms == Percentiles(10.0, 10.0, 10.0)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    shown = view()
    shown.add(look(requests=[ended(1)]))
    assert shown.add(look(seconds=WINDOW_S - 1)).body.models[0].requests == 1
    assert shown.add(look(seconds=WINDOW_S + 1)).body.models == ()


def test_charts_are_bounded() -> None:
    shown = view()
    for number in range(MAX_POINTS + 5):
        state = shown.add(look(seconds=number))
    assert len(state.series) == MAX_POINTS
    assert state.series[-1].at_unix_ms == START_UNIX_MS + 1000 * (MAX_POINTS + 4)


def test_who_comes_and_goes_is_an_event() -> None:
    shown = view()
    assert shown.add(look()).body.events == ()
    state = shown.add(look(seconds=1, workers=[worker(0, "second"), worker(2)], states=["stale", "ready"]))
    assert {each.what for each in state.body.events} == {
        "worker w0001 has left",
        "worker w0002 has joined",
        "worker w0000 was started again",
        "w0000 was ready and is stale",
    }


def test_a_killed_worker_is_loud() -> None:
    state = view().add(look(states=["ready", "stale"]))
    assert whats(state, Severity.ERROR) == ["w0001 says nothing of its load: it hangs, or is cut off"]
    state = view().add(look(workers=[worker(0)], states=["not in the snapshot"]))
    assert any("no scheduler places on it yet" in what for what in whats(state))
    state = view().add(look(workers=[]))
    assert whats(state, Severity.ERROR) == ["no worker is in the mesh: no request can be served"]


def test_many_instances_with_one_fault_are_one_line() -> None:
    workers = [worker(number) for number in range(1000)]
    state = view().add(look(workers=workers, states=["stale"] * 1000))
    (what,) = whats(state)
    assert what.startswith("w0000, w0001, w0002, w0003, w0004 and 995 more say")  # nothing runs, but it is readable


def test_who_does_not_answer_is_said_and_the_rest_is_shown() -> None:
    gone = Unanswered("scheduler scheduler-0 at s:1 did not answer")
    names = ("snapshot", "cluster", "cascades", "plans", "stages", "deployments", "leaders")
    fields = dict.fromkeys(names, gone)
    for name in ("policies", "reschedulers", "placements"):
        fields[name] = {"scheduler-0": gone}  # type: ignore[assignment]
    for name in ("frontends", "running", "ended"):
        fields[name] = {"frontend-0": gone}  # type: ignore[assignment]
    state = view().add(look(unwell={"monitor/monitor-0": "it hangs"}, **fields))
    assert {row.state for row in state.instances} == {"unknown"}
    assert state.body.policy is None
    assert "monitor monitor-0: it hangs" in whats(state, Severity.ERROR)
    assert gone.why in whats(state, Severity.ERROR)
    assert {row.role: row.health for row in state.body.members}["scheduler"] == gone.why


def test_roles_that_a_mesh_cannot_do_without_are_missed_others_are_not() -> None:
    state = view().add(look(control=[member("frontend")], cascades=Unanswered("no cascade has joined the mesh")))
    assert sorted(whats(state)) == [
        "no monitor is in the mesh: schedulers go on by what they knew last",
        "no scheduler is in the mesh: frontends place requests by frontend_round_robin",
    ]


def test_fallbacks_are_loud_and_standing_by_is_none() -> None:
    policy = scheduler_pb2.GetPolicyResponse(
        policy="penstock", fallback="round_robin", fallback_reason="no monitor", unusable=["mine of pkg: broken"]
    )
    state = view().add(look(policies={"scheduler-0": policy}))
    assert whats(state, Severity.ERROR) == [
        "scheduler scheduler-0 places by round_robin instead of penstock: no monitor"
    ]
    assert whats(state, Severity.WARNING) == ["a policy cannot be used: mine of pkg: broken"]
    policy.is_standby = True
    assert whats(view().add(look(policies={"scheduler-0": policy})), Severity.ERROR) == []


def test_frontends_that_wait_or_do_without_are_loud() -> None:
    status = frontend_pb2.GetFrontendStatusResponse(
        placement_fallback="frontend_round_robin", waiting_requests=3, parser_process="down: it died"
    )
    status.workers.add(instance_id="w0001", connected=False)
    status.schedulers.add(member_id="a", breaker="open", connected=True)
    status.schedulers.add(member_id="b", breaker="closed", connected=True)
    state = view().add(look(frontends={"frontend-0": status}))
    assert whats(state, Severity.ERROR) == [
        "frontend frontend-0 places by frontend_round_robin: no scheduler answers it",
        "3 requests wait at frontend frontend-0 for an instance",
    ]
    assert whats(state, Severity.WARNING) == [
        "the parser process of frontend frontend-0 is down: it died",
        "frontend frontend-0 is not connected to w0001",
        "frontend frontend-0 does not ask a: a placement was missed",
    ]


@pytest.mark.parametrize(
    ("state", "is_told"), [("ready", True), ("stale", True), ("starting", False), ("draining", False)]
)
def test_a_frontend_need_not_be_connected_to_who_begins_or_ends(state: str, is_told: bool) -> None:
    status = frontend_pb2.GetFrontendStatusResponse()
    status.workers.add(instance_id="w0001", connected=False)
    shown = view().add(look(frontends={"frontend-0": status}, states=["ready", state]))
    assert ("frontend frontend-0 is not connected to w0001" in whats(shown, Severity.WARNING)) == is_told


@pytest.mark.parametrize(
    ("promise", "shown"), [("kept", []), ("below", []), ("broken", ["the plan of c does not hold"])]
)
def test_a_promised_quality_is_shown_and_a_broken_one_is_a_fault(promise: str, shown: list[str]) -> None:
    plans = planner_pb2.ListPlansResponse()
    quality = plans.plans.add(cascade="c").quality
    quality.promised, quality.probability, quality.achieved, quality.labelled, quality.state = 85, 95, 70, 40, promise
    state = view().add(look(plans=plans))
    assert state.body.plans[0].promise.startswith(
        "promised at least 85 with 95 %, achieved 70.0 on 40 labelled answers"
    )
    assert [what[: len("the plan of c does not hold")] for what in whats(state, Severity.ERROR)] == shown
    quality.state = "a word of a later release"
    assert view().add(look(plans=plans)).body.plans[0].promise == ""


def test_what_a_plan_wants_and_nobody_runs_is_said() -> None:
    missing = MissingReplicas("m", 2, 1, 1, "no GPU is free")
    state = view().add(look(deployments=[DeploymentStatus("up", {"c": 3}, (missing,), ("m-7",))]))
    assert whats(state) == ["2 planned instances of m do not run: no GPU is free", "not planned and not yet gone: m-7"]


def test_placements_of_all_schedulers_latest_first_with_what_was_chosen() -> None:
    def told(request_id: str, at: int) -> scheduler_pb2.ListPlacementsResponse:
        answer = scheduler_pb2.ListPlacementsResponse()
        explanation = answer.placements.add(instances=9, excluded=1).explanation
        explanation.request_id, explanation.placed_unix_ms, explanation.chosen_instance_id = request_id, at, "w0001"
        explanation.decode_instance_id = "w0001"
        pull = scheduler_pb2.PulledPrefix(instance_id="w0002", tokens=3200, pull_ms=4.5, compute_ms=120)
        explanation.pull.CopyFrom(pull)
        explanation.scores.add(instance_id="w0000", score=20.0, indicators={"wait_ms": 15.0})
        explanation.scores.add(instance_id="w0001", score=10.0, indicators={"wait_ms": 5.0})
        return answer

    body = view().add(look(placements={"a": told("r1", 5), "b": told("r2", 6)})).body
    assert [(row.request_id, row.scheduler) for row in body.placements] == [("r2", "b"), ("r1", "a")]
    best = body.placements[0].options[0]
    assert (best.instance_id, best.is_chosen, best.parts) == ("w0001", True, {"wait_ms": 5.0})
    assert (body.placements[0].instances, body.placements[0].decoded_by) == (9, "")
    assert body.placements[0].pull == "pulls 3,200 tokens from w0002: 4.5 ms instead of 120 ms"


def test_moves_and_what_they_cost() -> None:
    answer = scheduler_pb2.GetReschedulerResponse(mode="current", in_charge=True, moved_total=1)
    answer.orders.add(
        request_id="r1",
        source_instance_id="w0000",
        target_instance_id="w0001",
        reason="lowers the variance",
        ordered_unix_ms=START_UNIX_MS,
        outcome=scheduler_pb2.ORDER_OUTCOME_MOVED,
        paused_ms=4.0,
        duration_ms=30.0,
    )
    body = view().add(look(reschedulers={"scheduler-0": answer})).body
    assert [(row.outcome, row.reason) for row in body.moves] == [("moved", "lowers the variance")]
    assert body.policy is not None
    assert (body.policy.rescheduler, body.policy.paused_ms_mean) == ("current", 4.0)


def test_a_cascade_s_achieved_quality_is_that_of_judged_answers() -> None:
    cascades = cascade_pb2.ListCascadesResponse()
    cascades.cascades.add(name="c", tiers=["small", "large"], thresholds=[60.0], judges=["confidence"])
    first = ended(1, model="c", tier="small")
    first.tiers.add(model="small", score=80.0, seconds=0.1)
    second = ended(2, model="c", tier="large")
    second.tiers.add(model="small", score=20.0, seconds=0.2)
    second.tiers.add(model="large", seconds=1.0)
    (row,) = view().add(look(cascades=cascades, requests=[first, second])).body.cascades
    assert (row.achieved_quality, row.judged, row.answered) == (80.0, 1, 2)
    small, large = row.tiers
    assert (small.threshold, small.share, small.answers, small.mean_score) == (60.0, 1.0, 1, 50.0)
    assert (large.threshold, large.share, large.answers, large.mean_score) == (None, 0.5, 1, None)
    assert (row.promised_quality, row.thresholds_from) == (None, "an operator")


def scaled(*, wanted: int = 2, policy: dict[str, Any] | None = None, **status: Any) -> autoscale_pb2.ListScaledResponse:
    """What a planner says of one model."""
    set_by = {"model": "m", "ttft_ms": 500.0, "maximum": 4, **(policy or {})}
    decided = {"model": "m", "wanted": wanted, "serving": 1, "cold_start_s": 30.0, "why": "it rains", **status}
    told = autoscale_pb2.ScaledModel(model="m", policy_json=json.dumps(set_by), status_json=json.dumps(decided))
    return autoscale_pb2.ListScaledResponse(models=[told])


def test_scales_are_shown_with_what_comes_next() -> None:
    shown, price = view(), {"price_per_hour": 2.0, "gpus": 2, "budget_per_hour": 13.0}
    (row,) = shown.add(look(scaled=scaled(policy=price, new_in_the_next_release=1, kept_share=0.98))).body.scales
    assert (row.serving, row.wanted, row.minimum, row.maximum, row.kept_share) == (1, 2, 1, 3, 0.98)
    assert (row.slo, row.cost) == ("99 % of requests within TTFT 500 ms", "8 of 13 an hour for 2 replicas")
    assert row.next == "starts 1 more, which serve about 30 s after the order"
    state = shown.add(look(seconds=1, scaled=scaled(wanted=0)))
    assert state.body.events[0].what == "m is scaled from 2 to 0: it rains"
    assert state.body.scales[0].next == "drains 1, the least loaded first"
    assert whats(state) == []
    state = shown.add(look(seconds=2, scaled=scaled(wanted=1, dry_run=True, refused="no GPU is free")))
    assert state.body.events[0].what == "m would be scaled from 0 to 1: it rains"
    assert state.body.scales[0].next == "nothing until it decides again, every 60 s"
    assert whats(state, Severity.WARNING) == ["m has 1 of 1 replicas: no GPU is free"]


def test_scales_that_nothing_is_known_of_are_shown_as_such() -> None:
    told = autoscale_pb2.ScaledModel(model="m", policy_json='{"model": "m", "e2e_ms": 9000, "interval_s": 10}')
    broken = autoscale_pb2.ScaledModel(model="n", policy_json="{")
    body = view().add(look(scaled=autoscale_pb2.ListScaledResponse(models=[told, broken]))).body
    (row,) = body.scales
    assert (row.decided, row.next) == (False, "decides within 10 s")
    assert view().add(look(scaled=Unanswered("no planner"))).body.scales == ()


def test_stages_are_shown_with_their_instances() -> None:
    stages = stages_pb2.GetStagesResponse(enabled=True)
    model = stages.models.add(model="m")
    model.stages.add(first_tokens=1, last_tokens=100).instances.add(instance_id="w0000", alive=True)
    model.stages.add(first_tokens=101).instances.add(instance_id="w0001", alive=True)
    state = view().add(look(stages=stages))
    assert [row.stage for row in state.instances] == ["1", "2"]
    assert [(row.number, row.last_tokens, row.instances) for row in state.body.stages] == [(1, 100, 1), (2, 0, 1)]


@pytest.mark.slow
def test_a_thousand_instances_are_one_look() -> None:
    workers = [worker(number) for number in range(1000)]
    state = view().add(look(workers=workers, control=CONTROL))
    assert len(state.instances) == 1000
    assert len(msgspec.json.encode(state)) < 400_000


def test_kv_is_shown_by_tier() -> None:
    report = load(engine_hit_tokens_total=5, host_hit_tokens_total=6, kv_blocks_used=9)
    report.pulls.tokens_total = 7
    fields = look(workers=[worker(0)], loads=[report])
    assert not isinstance(fields.snapshot, Unanswered)
    fields.snapshot.instances[0].host_blocks = 8
    (row,) = view().add(fields).instances
    assert (row.kv_used_blocks, row.kv_cached_blocks, row.kv_blocks, row.host_blocks) == (9, 7, 100, 8)
    assert (row.engine_hit_tokens, row.host_hit_tokens, row.pulled_tokens) == (5, 6, 7)


def test_service_over_very_many_requests_is_computed_every_few_seconds() -> None:
    view, count = View(Objectives(150.0, 20.0)), 2 * KEPT_PER_S
    at = {"arrived_unix_ms": START_UNIX_MS}
    view.add(look(requests=[ended(number + 1, **at) for number in range(count)]))
    more = [ended(count + 1, **at)]
    shown = [view.add(look(seconds=second, requests=more)).body for second in (1.0, 1.5, 2.0)]
    assert [body.models[0].requests for body in shown] == [count, count, count + 3]
    assert shown[0].totals.requests_s > 0, "what is of this moment is of this moment"
