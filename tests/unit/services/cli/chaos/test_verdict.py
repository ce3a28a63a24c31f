from dataclasses import replace

import pytest

from services.cli.chaos.schema import most_tokens, records_schema
from services.cli.chaos.verdict import MAX_FAILURES, Answer, ChaosReport, Tally, failures_in, judge, outcome_of

RIGHT = Answer("one two three", 5, finished=True, longest_gap_ms=10.0)


@pytest.mark.parametrize(
    ("text", "tokens", "fate"),
    [
        ("one two three", 5, "right"),
        ("one three", 4, "lost"),
        ("one two", 3, "lost"),
        ("one two two three", 6, "duplicated"),
        ("one two threw", 5, "wrong"),
        ("something else altogether", 5, "wrong"),
        ("one two three", 6, "wrong"),
    ],
)
def test_every_difference_has_a_name(text: str, tokens: int, fate: str) -> None:
    assert outcome_of(Answer(text, tokens, finished=True), RIGHT) == fate


def tallied(*answers: Answer) -> Tally:
    tally = Tally()
    for number, answer in enumerate(answers):
        tally.add(f"stream {number}", answer, RIGHT)
    return tally


def judged(streams: Tally, new: Tally, healed: bool = True) -> ChaosReport:
    return judge(streams, new, recovered=2, healed=healed, engine="simulated", fault="kill", seed=0)


def test_a_flawless_run() -> None:
    late = replace(RIGHT, wait_ms=70.0)
    report = judged(tallied(RIGHT, RIGHT, RIGHT), tallied(RIGHT, late))
    assert report.passed
    assert (report.streams, report.finished, report.new_requests, report.failed) == (3, 3, 2, 0)
    assert (report.recovered, report.gap_ms_max, report.wait_ms_max) == (2, 10.0, 70.0)


def test_a_stream_that_broke_off_is_lost_and_has_failed() -> None:
    broken = Answer("one", 0, finished=False, longest_gap_ms=50.0, error="worker lost", instance_id="w")
    streams = tallied(RIGHT, broken, RIGHT)
    report = judged(streams, tallied(RIGHT))
    assert not report.passed
    assert (report.finished, report.failed, report.lost, report.wrong) == (2, 1, 1, 0)
    assert (report.gap_ms_p50, report.gap_ms_max) == (10.0, 50.0)
    assert failures_in([streams]) == ["stream 1, begun on w: worker lost"]


def test_a_new_request_that_is_refused_or_wrong_counts_as_much() -> None:
    refused, wrong = Answer("", 0, finished=False, error="HTTP 503"), replace(RIGHT, text="one two threw")
    report = judged(tallied(RIGHT), tallied(refused, wrong))
    assert not report.passed
    assert (report.streams, report.new_requests, report.failed, report.lost, report.wrong) == (1, 2, 1, 1, 1)


def test_a_mesh_that_is_not_whole_again_is_a_flaw() -> None:
    assert not judged(tallied(RIGHT), tallied(), healed=False).passed


def test_stories_are_bounded() -> None:
    tally = tallied(*[Answer("", 0, finished=False, error="no")] * (MAX_FAILURES + 9))
    assert (tally.failed, len(failures_in([tally]))) == (MAX_FAILURES + 9, MAX_FAILURES)


def test_a_whole_answer_that_does_not_fit_its_schema_fails_the_run() -> None:
    fits = Answer('[{"kind": "red", "count": 3, "on": true, "tag": "a"}]', 9, finished=True)
    for text in ('[{"kind": "red", "count": 3, "on": true, "tag": "a"', "[]", '[{"kind": "violet"}]'):
        broken, tally = replace(fits, text=text), Tally()
        tally.add("stream 0", broken, broken, records_schema(50))
        report = judged(tally, tallied(RIGHT))
        assert (report.unfit, report.wrong, report.passed) == (1, 0, False), "the same text is no excuse"
    tally = Tally()
    tally.add("stream 0", fits, fits, records_schema(50))
    tally.add("stream 1", replace(fits, text="[", finished=False, error="cut"), fits, records_schema(50))
    assert tally.unfit == 0, "what is not whole has failed, and is counted there"


def test_an_answer_has_room_for_its_schema() -> None:
    schema = records_schema(300)
    assert schema["minItems"] == schema["maxItems"] == 4
    assert most_tokens(schema) >= 4 * len('{"kind":"green","count":999,"on":false,"tag":"aaaa"},') + 12 * 4
    assert records_schema(8)["minItems"] == 1
