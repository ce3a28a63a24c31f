"""What `penstock status` says of length prediction, for people."""

from typing import Any

from services.cli.prediction_status import prediction_lines

WORKER = {"source": "llm_native", "artefact": "m@1", "reason": "", "every_steps": 20}


def folder(**fields: Any) -> dict[str, Any]:
    known = {"folder": "/a", "artefact": "m@1", "inputs": "state", "test_mae_tokens": 12.34, "refused": ""}
    return known | fields


def lines(
    *workers: dict[str, Any],
    folders: tuple[dict[str, Any], ...] = (),
    learnt: tuple[dict[str, Any], ...] | None = None,
) -> list[str]:
    predictor = {
        "member_id": "p",
        "fallback": "mean_residual",
        "folders": folders,
        "learns": learnt is not None,
        "learnt": learnt or (),
    }
    named = [{"member_id": f"w{number}", **worker} for number, worker in enumerate(workers)]
    return prediction_lines({"predictors": [predictor], "workers": named})


def test_workers_of_one_source_share_a_line() -> None:
    assert lines(WORKER, WORKER, folders=(folder(),)) == [
        "predictor p: m@1 (state, 12.3 tokens of error on held-out requests)",
        "remaining lengths of w0, w1: llm_native, m@1, every 20 steps",
    ]


def test_a_refused_artefact_and_a_fallback_are_red_and_say_why() -> None:
    fallen = {"source": "mean_residual", "artefact": "", "reason": "no {predictor} [here]", "every_steps": 20}
    in_force, refused, worker = lines(fallen, folders=(folder(refused="format 9"),))
    assert in_force.startswith("predictor p: m@1")
    assert refused == "[red]predictor p: /a is not in force: format 9[/]"
    assert worker == "[red]remaining lengths of w0: mean_residual, every 20 steps: no {predictor} \\[here][/]"


def test_what_is_missing_or_silent_is_named() -> None:
    off = {"source": "off", "artefact": "", "reason": "", "every_steps": 0}
    said = lines(off, {"error": "worker w1 cannot be reached"})
    assert said[0] == "predictor p: no artefact; workers go on with mean_residual"
    assert said[1] == "remaining lengths of w0: not predicted"
    assert said[2] == "[red]remaining lengths of w1: worker w1 cannot be reached[/]"
    assert prediction_lines({"predictors": [{"member_id": "p", "error": "gone"}], "workers": []}) == [
        "[red]predictor p: gone[/]"
    ]


def test_what_is_learnt_says_how_good_it_is_and_a_drift_is_red() -> None:
    known = {"model": "m", "ended_requests": 1200, "hidden_size": 64, "is_network": True, "coverage": 0.79, "drifts": 0}
    errors = {"mae_tokens": 12.34, "residual_mae_tokens": 30.0}
    assert lines(learnt=(known | errors,)) == [
        "predictor p: m learnt from 1200 requests (states of width 64), 12.3 tokens of error, 30.0 by residual life, "
        "79% within the range"
    ]
    (drifted,) = lines(learnt=(known | errors | {"drifts": 2, "is_network": False},))
    assert drifted.startswith("[red]")
    assert "30.0 by residual life (which answers)" in drifted
    assert drifted.endswith("drifted 2 times[/]")
    (fresh,) = lines(learnt=(known | {"hidden_size": 0, "mae_tokens": "NaN", "residual_mae_tokens": "NaN"},))
    assert fresh.endswith("(no hidden states), not judged yet")
    assert lines(learnt=()) == ["predictor p: learns from requests that end; none has ended yet"]


def test_answers_that_go_round_in_circles_are_red() -> None:
    assert lines(WORKER | {"looping_requests": 3})[-1] == "[red]w0: 3 answers go round in circles[/]"
    assert "circles" not in "".join(lines(WORKER | {"looping_requests": 0}))
