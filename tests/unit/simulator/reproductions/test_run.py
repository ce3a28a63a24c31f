import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import get_type_hints

import msgspec
import pytest
from click.testing import CliRunner
from msgspec import structs

from mesh.errors import ConfigurationError
from services.cli.reproduce import command
from simulator.report.report import Slo, summarise
from simulator.reproductions import registry
from simulator.reproductions.cascadia import cases
from simulator.reproductions.cascadia.accuracy import figure_2, table_1
from simulator.reproductions.cascadia.drift import run_drift
from simulator.reproductions.cascadia.workload import tables_of
from simulator.reproductions.lines_plot import Panel, draw_lines
from simulator.reproductions.lmetric import experiment as lmetric
from simulator.reproductions.lmetric.hotspot import measure_hotspot
from simulator.reproductions.measurement import LoadPoint, find_sustainable_rate, measure
from simulator.reproductions.page import show_measured
from simulator.reproductions.registry import Paper, reproduce
from simulator.reproductions.report import Findings, ReportRow, Section, decode_report
from simulator.reproductions.run import EngineEra, ReproductionRun

ROWS = (
    ReportRow(claim="speed | of light", paper=3.0, ours=2.998, unit="1e8 m/s"),
    ReportRow(claim="speed of sound", paper=None, ours=None, unit="m/s", why="no air\nhere"),
)


def _measure(run: ReproductionRun) -> Findings:
    draw_lines(run.plots / "a.png", [Panel("t", "x", "y", {"ours": [(1, 2), (0, 1)]}, {"target": 0.9})] * 5, "all")
    return Findings(rows=ROWS, sections=(Section(title="Setup", markdown="as it was"),), plots=("a.png",))


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("a_paper")
    module.reproduce = _measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_paper", module)
    monkeypatch.setattr(registry, "PAPERS", MappingProxyType({"light": Paper("a_paper", "On light")}))
    return "light"


def _run(tmp_path: Path, quick: bool = False) -> ReproductionRun:
    return ReproductionRun(tmp_path, tmp_path / "out", seed=4, quick=quick, processes=1)


def _point(scale: float, searched: Path) -> LoadPoint:
    with searched.open("a") as file:
        file.write(f"{scale} ")
    return LoadPoint(scale, 2 * scale, summarise([], Slo(), policy="lmetric", seed=0))


def test_what_a_journal_has_of_the_same_jobs_is_not_measured_again(tmp_path: Path) -> None:
    run, searched = replace(_run(tmp_path), journal=tmp_path / "journal.jsonl"), tmp_path / "searched"
    first = run.run_jobs({"a": partial(_point, 1.0, searched), "b": partial(_point, 2.0, searched)})
    assert searched.read_text() == "1.0 2.0 "
    again = run.run_jobs(
        {name: partial(_point, scale, searched) for name, scale in (("b", 2.0), ("a", 1.5), ("c", 3.0))}
    )
    assert searched.read_text() == "1.0 2.0 1.5 3.0 "
    assert list(again) == ["b", "a", "c"]
    assert again["b"] == first["b"]
    assert again["a"].scale == 1.5


@pytest.mark.parametrize(
    "function",
    [
        lmetric._highest,
        lmetric._place,
        measure_hotspot,
        find_sustainable_rate,
        measure,
        cases.at_own_rate,
        cases.highest_rates,
        run_drift,
        tables_of,
        table_1,
        figure_2,
    ],
)
def test_results_of_papers_that_keep_a_journal_can_be_read_from_it(function: Callable[..., object]) -> None:
    msgspec.json.Decoder(get_type_hints(function)["return"])  # raises for what JSON cannot hold


def test_only_papers_that_keep_a_journal_are_given_one(paper: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keeps no journal; leave --journal out, or take one of: "):
        reproduce(paper, replace(_run(tmp_path), journal=tmp_path / "journal.jsonl"))


@pytest.mark.slow
def test_leaves_report_page_and_plots(paper: str, tmp_path: Path) -> None:
    report = reproduce(paper, _run(tmp_path, quick=True))
    document = (tmp_path / "out" / "report.json").read_bytes()
    assert decode_report(document) == report
    fields = json.loads(document)
    assert set(fields) == {"paper", "rows", "seed", "seconds", "quick"}
    light = {"claim": "speed | of light", "paper": 3.0, "ours": 2.998, "unit": "1e8 m/s", "why": "", "interval": 0.0}
    assert fields["rows"][0] == light
    page = (tmp_path / "out" / "report.md").read_text()
    assert "# On light" in page
    assert "![a.png](plots/a.png)" in page
    assert "## Setup" in page
    assert "| speed \\| of light | 3 | 3 | 1e8 m/s |  |" in page
    assert "| - | - | m/s | no air here |" in page
    assert "--seed 4 --quick" in page
    assert (tmp_path / "out" / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_mean_over_seeds_is_shown_with_its_interval() -> None:
    row = ReportRow(claim="c", paper=92.0, ours=91.23, unit="%", interval=1.26)
    assert show_measured(row) == "91.2 +- 1.3"
    assert show_measured(structs.replace(row, interval=0.0)) == "91.2"


def test_every_registered_paper_has_its_function() -> None:
    for paper in registry.PAPERS.values():
        assert callable(paper.load())
        assert paper.title


def test_unknown_papers_data_and_folders_are_named(paper: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="papers that can be reproduced: light"):
        reproduce("dark", _run(tmp_path))
    with pytest.raises(ConfigurationError, match=r"no traces/x\.csv"):
        _run(tmp_path).trace("x.csv")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigurationError, match="--out"):
        reproduce(paper, _run(tmp_path))


def test_an_era_that_a_paper_has_not_is_refused(paper: str, tmp_path: Path) -> None:
    run = replace(_run(tmp_path), engine_era=EngineEra.VLLM_0_9)
    with pytest.raises(ConfigurationError, match="no engine of another era"):
        reproduce(paper, run)


@pytest.mark.slow
def test_the_command_prints_the_report(paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.params[0], "type", type(command.params[0].type)(["light"]))  # type: ignore[call-arg]
    arguments = [paper, "--data", str(tmp_path), "--out", str(tmp_path / "new" / "out"), "--seed", "7"]
    result = CliRunner().invoke(command, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert decode_report(result.stdout.encode()).seed == 7
    assert "speed of sound" in CliRunner().invoke(command, arguments).stdout
    assert CliRunner().invoke(command, ["dark", *arguments[1:]]).exit_code == 2
