"""Which mode reschedules, and by what name another one stands in."""

import pytest

from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import decode_load
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import DecodeInstance
from controlplane.policies.rescheduling.switch import ReschedulerSwitch
from controlplane.policies.rescheduling.view import DecodeView


def view(*remaining: int | None, instances: int = 2, unheard: int = 0) -> DecodeView:
    load = decode_load(
        [RunningRequest(f"r{n}", 9, 1, left) for n, left in enumerate(remaining)], ReschedulerParameters().horizon
    )
    empty = decode_load([], ReschedulerParameters().horizon)
    known = tuple(DecodeInstance(f"i{n}", 100, 1.0, True, empty if n else load) for n in range(instances))
    return DecodeView("m", known, {f"u{n}": "has told of its running requests never" for n in range(unheard)}, unheard)


def mode(switch: ReschedulerSwitch, seen: DecodeView) -> tuple[str, bool]:
    rescheduler, changed = switch.rescheduler(seen)
    return str(rescheduler.mode), changed


@pytest.mark.parametrize("wanted", [ReschedulerMode.PREDICTED, ReschedulerMode.TRAJECTORIES])
def test_without_predictions_the_current_load_stands_in_and_says_so(wanted: ReschedulerMode) -> None:
    switch = ReschedulerSwitch(wanted)
    assert mode(switch, view(5, 5)) == (wanted, False)
    assert mode(switch, view(5, None, None)) == ("current", True)
    assert "1 of 3 running requests of m have a predicted length" in switch.fallbacks["m"].reason
    assert mode(switch, view(None)) == ("current", False), "told once"
    assert mode(switch, view()) == ("current", False), "no request, no news"
    assert mode(switch, view(5, None)) == (wanted, True)
    assert switch.fallbacks == {}


def test_nothing_is_moved_blindly() -> None:
    switch = ReschedulerSwitch(ReschedulerMode.CURRENT)
    assert mode(switch, view(5, instances=1, unheard=1)) == ("off", True)
    known = "the running requests of fewer than 2 instances of m are known: u0 has told of its running requests never"
    assert switch.fallbacks["m"].reason == known
    mode(switch, view(5, instances=1, unheard=2))
    assert switch.fallbacks["m"].reason == f"{known} (and 1 more)"
    mode(switch, view(5, instances=1, unheard=3))
    assert switch.fallbacks["m"].reason == f"{known} (and 2 more)"
    assert mode(switch, view(5, instances=2, unheard=1)) == ("current", True)
    assert mode(switch, view(5, instances=1)) == ("current", False), "one instance is no trouble, only no choice"


def test_an_idle_mesh_does_not_keep_to_a_fallback_whose_reason_is_over() -> None:
    switch = ReschedulerSwitch(ReschedulerMode.PREDICTED)
    assert mode(switch, view(instances=0, unheard=2)) == ("off", True)
    assert mode(switch, view()) == ("predicted", True), "all have told of their requests: none"
    assert switch.fallbacks == {}


def test_a_new_configuration_starts_without_fallbacks() -> None:
    switch = ReschedulerSwitch(ReschedulerMode.PREDICTED)
    mode(switch, view(None))
    assert not switch.configure(ReschedulerMode.PREDICTED, ReschedulerParameters())
    parameters = ReschedulerParameters(theta=0.5)
    assert switch.configure(ReschedulerMode.PREDICTED, parameters)
    assert switch.rescheduler(view(5))[0].parameters == parameters
    assert switch.configure(ReschedulerMode.OFF, ReschedulerParameters())
    assert switch.fallbacks == {}
    assert mode(switch, view(None, unheard=3, instances=0)) == ("off", False)
