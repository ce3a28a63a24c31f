"""`penstock plan cascade`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from controlplane.planning.cascade.bilevel import PlanRequest
from controlplane.planning.cascade.plan import decode_plan
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import read_window, read_workload, write_window, write_workload
from mesh.errors import ConfigurationError, PlanInfeasible
from penstock.v1 import planner_pb2
from services.cli.planning import live
from services.cli.planning.command import command
from services.cli.planning.plan_table import accepted_from
from services.cli.planning.tables_file import read_tables, write_tables
from simulator.cascade.curves import StoredCurve
from tests.unit.simulator.cascade.short_runs import short_runs

TIERS = ("--tier", "small=Llama-3.2-3B@H100", "--tier", "large=Llama-3.1-8B@H100")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    sample = CascadeSample(
        scores=np.clip(rng.normal((55, 85), 12, (60, 2)), 0, 100),
        input_tokens=rng.integers(20, 400, 60),
        output_tokens=rng.integers(5, 30, (60, 2)),
        rate_per_s=4.0,
    )
    path = tmp_path / "workload.jsonl"
    path.write_bytes(b"\n".join(write_workload(("small", "large"), sample)))
    return path


@pytest.fixture(autouse=True)
def _short_runs() -> Iterator[None]:
    with short_runs():
        yield


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["cascade", *map(str, arguments)], catch_exceptions=True)


@pytest.mark.slow
def test_a_plan_comes_as_json_table_and_plot_and_its_tables_are_kept(workload: Path, tmp_path: Path) -> None:
    out, plot, tables = tmp_path / "plan.json", tmp_path / "front.png", tmp_path / "tables.json"
    common = ("--workload", workload, "--gpus", "2", *TIERS, "--tables", tables)
    result = run(*common, "--quality", "70", "--json", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    plan = decode_plan(out.read_bytes())
    assert plan.quality >= 70
    assert [tier.model for tier in plan.tiers] == ["small", "large"]
    assert "small" in result.output
    assert plan.steady is not None
    assert f"in {plan.steady.runs} steady runs of" in " ".join(result.output.split())
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = run(*common, "--quality", "70", "--json", "-")
    assert decode_plan(again.stdout.strip().encode()) == plan
    assert " 0 tables simulated" in again.stderr


def test_tables_of_earlier_formats_are_simulated_anew_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tables.json"
    curve = {"key": "a/TP=1/1-1-1-1/0", "rates_per_s": [1.0], "p95_s": [2.0]}
    path.write_bytes(msgspec.json.encode([curve]))
    assert read_tables(path) == ()
    assert "1 tables are of an older form without means" in capsys.readouterr().err
    kept = (StoredCurve("a/TP=1/1-1-1-1/0", (1.0,), (2.0,), (1.5,), 1.1),)
    path.write_bytes(msgspec.json.encode({"format": 2, "curves": [curve | {"mean_s": [1.5]}]}))
    assert read_tables(path) == ()
    assert "1 tables are of an older form, not of steady states" in capsys.readouterr().err
    write_tables(path, kept)
    assert read_tables(path) == kept
    assert read_tables(tmp_path / "none.json") == ()


@pytest.mark.parametrize("content", [b"", b"[1]", b'[{"key": 1}]', b"{}", b'{"format": 4, "curves": []}'])
def test_a_file_of_something_else_is_no_tables_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="choose another file"):
        read_tables(path)


@pytest.mark.slow
def test_a_budget_of_latency_may_be_asked_for_instead(workload: Path) -> None:
    result = run("--workload", workload, "--gpus", "2", *TIERS, "--latency-s", "9", "--judge-s", "0.1", "--json", "-")
    assert result.exit_code == 0, result.output
    assert msgspec.json.decode(result.stdout)["latency_p95_s"] <= 9


@pytest.mark.slow
def test_answers_that_are_given_up_at_another_rate_make_a_faster_plan(workload: Path, tmp_path: Path) -> None:
    models, sample = read_workload(workload.read_bytes().splitlines())
    fallen = tuple(
        tuple(((1, score),) if score < 100 else () for score in answers) for answers in sample.scores.tolist()
    )
    falling = tmp_path / "falling.jsonl"
    falling.write_bytes(b"\n".join(write_workload(models, replace(sample, score_bounds=fallen))))
    options = ("--gpus", "2", *TIERS, "--tables", tmp_path / "tables.json", "--rate", "0.5")
    options += ("--quality", "83.2", "--probability", "0")
    made = [
        decode_plan(
            run("--workload", path, *options, "--minimise", "end-to-end", "--json", "-").stdout.strip().encode()
        )
        for path in (workload, falling)
    ]
    assert [plan.rate_per_s for plan in made] == [0.5, 0.5]
    assert all(plan.quality >= 83.2 for plan in made), "the large model by itself is not that good"
    assert made[1].latency_s < made[0].latency_s


@pytest.mark.slow
def test_the_mean_from_end_to_end_may_be_minimised_instead(workload: Path, tmp_path: Path) -> None:
    tables = tmp_path / "tables.json"
    common = ("--workload", workload, "--gpus", "2", *TIERS, "--judge-s", "0.1", "--tables", tables)
    by_word = {}
    for word in ("slowest-tier", "end-to-end"):
        result = run(*common, "--quality", "60", "--minimise", word, "--json", "-")
        assert result.exit_code == 0, result.output
        by_word[word] = decode_plan(result.stdout.strip().encode())
    slowest, end_to_end = by_word.values()
    assert (slowest.minimise, end_to_end.minimise) == ("slowest_tier", "end_to_end")
    assert (end_to_end.latency_mean_s or 0.0) <= (slowest.latency_mean_s or 0.0) * 1.02
    assert end_to_end.latency_s == end_to_end.latency_mean_s
    shown = run(*common, "--latency-s", "9", "--minimise", "end-to-end", "--plot", tmp_path / "front.png")
    assert shown.exit_code == 0, shown.output
    assert "mean from end to end within 9 s" in " ".join(shown.stdout.split())
    assert run(*common, "--quality", "60", "--minimise", "both").exit_code == 2


@pytest.mark.parametrize(("words", "minimise"), [((), "slowest_tier"), (("--minimise", "end-to-end"), "end_to_end")])
def test_a_goal_says_what_its_plans_minimise(
    words: tuple[str, ...], minimise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def answered(_store: str | None, _mesh: str, method: str, request: object) -> dict[str, object]:
        asked.append((method, request))
        return {}

    monkeypatch.setattr(live, "_call", answered)
    result = CliRunner().invoke(
        command, ["goal", "both", "--gpus", "2", "--tier", "a@H100", "--tier", "b@H100", "--quality", "80", *words]
    )
    assert result.exit_code == 0, result.output
    goal = planner_pb2.CascadeGoal(
        cascade="both", gpus=2, tiers=["a@H100", "b@H100"], quality=80.0, replan=True, minimise=minimise, probability=95
    )
    assert not goal.HasField("judge_s"), "the planner knows the judge"
    assert asked == [("SetGoal", planner_pb2.SetGoalRequest(goal=goal))]


@pytest.mark.slow
def test_a_plan_says_by_whose_scores_and_for_which_workload_it_was_made(
    workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_s: list[float] = []

    def requested(**fields: Any) -> PlanRequest:
        judged_s.append(fields["judge_s"])
        return PlanRequest(**fields)

    monkeypatch.setattr("services.cli.planning.command.PlanRequest", requested)
    _, sample = read_workload(workload.read_bytes().splitlines())
    tables = ("--tables", tmp_path / "tables.json")
    common = ("--gpus", "2", *TIERS, *tables, "--quality", "60", "--json", "-")
    unsaid = decode_plan(run("--workload", workload, *common).stdout.strip().encode())
    assert (unsaid.judge, unsaid.workload) == ("", None)
    by_confidence = run("--workload", workload, *common, "--judge", "confidence")
    assert isinstance(by_confidence.exception, ConfigurationError)
    assert "--labels FILE" in str(by_confidence.exception)
    labels, named = tmp_path / "people.jsonl", tmp_path / "named.jsonl"
    window = read_window(workload.read_bytes().splitlines())
    requests = [msgspec.structs.replace(each, request_id=str(n)) for n, each in enumerate(window.requests)]
    named.write_bytes(b"\n".join(write_window(replace(window, requests=tuple(requests), judge="confidence"))))
    labels.write_bytes(
        b"\n".join(b'{"request_id": "%d", "quality": [%d, 100]}' % (n, 100 * (n % 2)) for n in range(60))
    )
    said = decode_plan(run("--workload", named, "--labels", labels, *common).stdout.strip().encode())
    assert said.promise is not None
    assert (said.promise.quality, said.promise.probability, said.promise.label) == (60, 95, "people.jsonl")
    assert said.promise.lower >= 60
    assert [tier.calibration.samples for tier in said.tiers if tier.calibration] == [60, 60]
    assert said.judge == "confidence"
    assert said.workload is not None
    assert (said.workload.rate_per_s, said.workload.requests) == (4.0, 60)
    assert said.workload.scores == pytest.approx(sample.scores.mean(axis=0).tolist())
    assert judged_s == [1.0, 0.0], "a judgement by confidence takes no time"


def test_a_goal_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, removed = [], True

    async def answered(_store: str | None, _mesh: str, method: str, request: object) -> dict[str, object]:
        asked.append((method, request))
        return {"removed": removed}

    monkeypatch.setattr(live, "_call", answered)
    result = CliRunner().invoke(command, ["goal", "both", "--remove"])
    assert (result.exit_code, asked) == (0, [("RemoveGoal", planner_pb2.RemoveGoalRequest(cascade="both"))])
    assert "the plan in force stays" in result.output
    removed = False
    assert isinstance(CliRunner().invoke(command, ["goal", "both", "--remove"]).exception, ConfigurationError)
    for options, words in ((("--remove", "--gpus", "2"), "goes without"), (("--gpus", "2"), "a goal needs --tier")):
        refused = CliRunner().invoke(command, ["goal", "both", *options])
        assert refused.exit_code == 2
        assert words in refused.output


@pytest.mark.slow
def test_what_cannot_be_met_and_what_is_wrong_is_said(workload: Path, tmp_path: Path) -> None:
    common = ("--workload", workload, "--gpus", "2", *TIERS)
    assert isinstance(run(*common, "--quality", "99.5").exception, PlanInfeasible)
    assert isinstance(run(*common).exception, ConfigurationError)
    swapped = run("--workload", workload, "--gpus", "2", *TIERS[2:], *TIERS[:2], "--quality", "70")
    assert swapped.exit_code == 2
    assert "in this order" in swapped.output
    assert run("--workload", workload, "--gpus", "2", "--tier", "small", "--quality", "70").exit_code == 2
    workload.write_text("{}")
    broken = run(*common, "--quality", "70")
    assert broken.exit_code == 2
    assert "line 1" in broken.output


@pytest.mark.parametrize(("threshold", "words"), [(0.0, "all"), (62.04, "62.0"), (100.0, "100.0"), (100.1, "skipped")])
def test_a_threshold_in_words(threshold: float, words: str) -> None:
    assert accepted_from(threshold) == words
