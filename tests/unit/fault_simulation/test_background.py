"""Responses in the background, under faults: a frontend's loss loses none, and what would be wrong is seen."""

import pytest

from fault_simulation.draws import BACKGROUND_EVERY, draw
from fault_simulation.run import run_seed
from services.frontend.http.exchange import Exchange
from services.frontend.requests.background import BackgroundResponses

pytestmark = [pytest.mark.slow, pytest.mark.live]

SEED = 50
"""Frontends are lost in it while they make responses, streamed and not."""


def test_the_seeds_that_have_them() -> None:
    for number in (0, 4, 5):
        timeline = draw(number * BACKGROUND_EVERY)
        assert timeline.topology.frontends > 1
        polls = [request for request in timeline.requests if request.behaviour == "polls"]
        assert {bool(request.body["stream"]) for request in polls} == {True, False}
        assert not any(request.behaviour == "polls" for request in draw(number * BACKGROUND_EVERY + 1).requests)


def test_another_frontend_goes_on_and_every_event_comes_once() -> None:
    outcome = run_seed(SEED)
    assert outcome.violations == ()
    polled = [asked for asked in outcome.asked if asked.request.behaviour == "polls"]
    assert sum(asked.attempts[-1].answer.choices != {} for asked in polled) > len(polled) / 2
    assert outcome.digest == run_seed(SEED).digest


def test_a_response_that_nobody_goes_on_with_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundResponses, "_take_over", lambda *_: None)
    assert run_seed(SEED).kinds == {"endless request"}


def test_events_that_are_cut_otherwise_the_second_time_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_pieces = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(Exchange, "token_by_token", whole_pieces, raising=False)
    assert run_seed(SEED).kinds & {"wrong answer", "endless request"}
