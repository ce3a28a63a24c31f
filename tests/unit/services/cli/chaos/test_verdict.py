import pytest

from services.cli.chaos.verdict import Answer, fate_of, judge

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
    assert fate_of(Answer(text, tokens, finished=True), RIGHT) == fate


def test_a_flawless_run() -> None:
    report = judge([RIGHT] * 3, [RIGHT] * 3, recovered=2, engine="simulated", fault="kill", seed=0)
    assert report.flawless
    assert (report.finished, report.recovered, report.gap_ms_max) == (3, 2, 10.0)


def test_a_stream_that_broke_off_is_lost_and_not_finished() -> None:
    broken = Answer("one", 0, finished=False, longest_gap_ms=50.0)
    report = judge([RIGHT, broken, RIGHT], [RIGHT] * 3, recovered=0, engine="simulated", fault="hang", seed=0)
    assert not report.flawless
    assert (report.finished, report.lost, report.wrong) == (2, 1, 0)
    assert (report.gap_ms_p50, report.gap_ms_max) == (10.0, 50.0)
