"""`penstock stages` for people."""

from typing import Any

from click.testing import CliRunner

from services.cli.stages import command, stage_lines

STAGE = {"first_tokens": 1, "last_tokens": 120, "planned_last_tokens": 100}
LAST = {"first_tokens": 121, "last_tokens": 0, "planned_last_tokens": 0}
MODEL: dict[str, Any] = {
    "model": "m",
    "revision": 2,
    "planned_unix_ms": 0,
    "lengths": 300,
    "in_flight": 12.5,
    "profile": "/penstock/profiles/vllm/m/cpu",
    "obstacle": "",
    "stages": [
        {**STAGE, "instances": [{"instance_id": "a", "alive": True}, {"instance_id": "b", "alive": False}]},
        {**STAGE, "instances": [{"instance_id": "c", "alive": False}]},
        {**LAST, "instances": [{"instance_id": "d", "alive": True}]},
    ],
    "boundary_moves": [{"at_unix_ms": 0, "instance_id": "a", "boundary_tokens": 119.6}],
}


def test_stages_ranges_and_moves_are_shown() -> None:
    lines = stage_lines({"enabled": True, "models": [MODEL]}, moves=5)
    assert "plan 2" in lines[0]
    assert lines[1:4] == [
        "  stage 1: 1 to 120 tokens, planned 100: a, b (gone)",
        "  stage 2: c (gone); covered by its neighbour",
        "  stage 3: 121 to any tokens: d",
    ]
    assert lines[4].endswith("the range of a ends at: 120 tokens")


def test_what_is_missing_is_said() -> None:
    assert stage_lines({"error": "no planner"}) == ["stages: no planner"]
    assert stage_lines({"enabled": False, "models": []}) == ["stages: off"]
    none_yet = {**MODEL, "revision": 0, "obstacle": "3 requests have ended so far, a plan needs 50"}
    (line,) = stage_lines({"enabled": True, "models": [none_yet]})
    assert line.endswith("all instances are one; 3 requests have ended so far, a plan needs 50")


def test_settings_go_with_on() -> None:
    result = CliRunner().invoke(command, ["--method", "chain"])
    assert result.exit_code == 2
    assert "go with `penstock stages on`" in result.output
