"""Who takes part in rescheduling, who does not and why, and what the mesh has it configured to."""

import pytest

from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import DecodeLoad, decode_load
from controlplane.policies.rescheduling.parameters import Horizon, ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.record import ReschedulerRecord
from controlplane.policies.rescheduling.view import MISSED_REPORTS, InstanceReport, decode_view
from mesh.errors import ConfigurationError

PARAMETERS = ReschedulerParameters(interval_s=2.0)
RUNNING = [
    RunningRequest("r", 30, 3, 25, frontend_id="f"),
    RunningRequest("s", 9, 9, None, frontend_id="g"),
]
LOAD = decode_load(RUNNING, PARAMETERS.horizon)
OLDEST_S = MISSED_REPORTS * PARAMETERS.interval_s


def alike(load: DecodeLoad, other: DecodeLoad) -> bool:
    """Equal in all that they hold; arrays compare by element."""
    return (load.request_ids, load.horizon, load.frontends) == (other.request_ids, other.horizon, other.frontends) and [
        each.tolist() for each in (load.context_tokens, load.remaining_tokens, load.future_tokens)
    ] == [each.tolist() for each in (other.context_tokens, other.remaining_tokens, other.future_tokens)]


def report(name: str, *, heard_s: float | None = 0.0, **facts: object) -> InstanceReport:
    return InstanceReport(name, 1000, 5.0, facts.pop("load", LOAD), heard_s, **facts)  # type: ignore[arg-type]


def test_all_that_have_told_of_their_requests_take_part() -> None:
    view = decode_view("m", [report("a"), report("b", heard_s=-1.0)], PARAMETERS, frozenset("b"), 0.0)
    assert [(each.instance_id, each.may_receive) for each in view.instances] == [("a", True), ("b", False)]
    assert [(each.capacity_tokens, each.step_ms) for each in view.instances] == [(1000, 5.0)] * 2
    assert (view.model, view.excluded, view.unheard) == ("m", {}, 0)
    assert (view.requests, view.predicted_requests) == (4, 2)


def test_who_does_not_take_part_is_named_with_the_reason() -> None:
    reports = [
        report("full", refusal="it takes nothing new"),
        report("mute", heard_s=None),
        report("empty", load=None),
        report("late", heard_s=-OLDEST_S - 0.5),
        report("stuck", transfer_obstacle="no route"),
        report("drains", refusal="it drains", is_ready=False),
        report("in time", heard_s=-OLDEST_S),
    ]
    view = decode_view("m", reports, PARAMETERS, frozenset(), 0.0)
    assert view.excluded == {
        "drains": "it drains",
        "full": "it takes nothing new",
        "mute": "has told of its running requests never",
        "empty": "has told of its running requests 0.0 s ago",
        "late": f"has told of its running requests {OLDEST_S + 0.5:.1f} s ago",
        "stuck": "cannot move requests: no route",
    }
    assert view.unheard == 4, "one that drains need not tell, one that is stuck has told"
    assert [each.instance_id for each in view.instances] == ["in time"]


def test_a_load_over_another_horizon_is_what_the_worker_would_report() -> None:
    other = Horizon(steps=2, stride_tokens=20)
    assert LOAD.frontends == ("f", "g")
    assert LOAD.over(PARAMETERS.horizon) is LOAD
    assert LOAD.over(other).horizon == other
    assert alike(LOAD.over(other), decode_load(RUNNING, other))
    assert not alike(LOAD.over(other), LOAD)


def test_the_record_is_read_with_its_defaults_and_refused_by_name() -> None:
    mode, parameters = ReschedulerRecord("predicted", {"theta": 0.5}).read()
    assert (mode, parameters) == (ReschedulerMode.PREDICTED, ReschedulerParameters(theta=0.5))
    known = "there is no rescheduler mode 'fast'; choose one of: " + ", ".join(ReschedulerMode)
    with pytest.raises(ConfigurationError, match=known):
        ReschedulerRecord("fast").read()
    with pytest.raises(ConfigurationError, match=r"policy 'rescheduler'.*nonsense"):
        ReschedulerRecord("predicted", {"nonsense": 1.0}).read()
