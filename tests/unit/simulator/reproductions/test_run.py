import json
import sys
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest
from click.testing import CliRunner

from mesh.errors import ConfigurationError
from services.cli.reproduce import command
from simulator.reproductions import registry
from simulator.reproductions.lines_plot import Panel, draw_lines
from simulator.reproductions.registry import Paper, reproduce
from simulator.reproductions.report import Findings, ReportRow, Section, decode_report
from simulator.reproductions.run import ReproductionRun

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


@pytest.mark.slow
def test_leaves_report_page_and_plots(paper: str, tmp_path: Path) -> None:
    report = reproduce(paper, _run(tmp_path, quick=True))
    document = (tmp_path / "out" / "report.json").read_bytes()
    assert decode_report(document) == report
    fields = json.loads(document)
    assert set(fields) == {"paper", "rows", "seed", "seconds", "quick"}
    assert fields["rows"][0] == {"claim": "speed | of light", "paper": 3.0, "ours": 2.998, "unit": "1e8 m/s", "why": ""}
    page = (tmp_path / "out" / "report.md").read_text()
    assert "# On light" in page
    assert "![a.png](plots/a.png)" in page
    assert "## Setup" in page
    assert "| speed \\| of light | 3 | 3 | 1e8 m/s |  |" in page
    assert "| - | - | m/s | no air here |" in page
    assert "--seed 4 --quick" in page
    assert (tmp_path / "out" / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.slow
def test_the_command_prints_the_report(paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.params[0], "type", type(command.params[0].type)(["light"]))  # type: ignore[call-arg]
    arguments = [paper, "--data", str(tmp_path), "--out", str(tmp_path / "new" / "out"), "--seed", "7"]
    result = CliRunner().invoke(command, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert decode_report(result.stdout.encode()).seed == 7
    assert "speed of sound" in CliRunner().invoke(command, arguments).stdout
    assert CliRunner().invoke(command, ["dark", *arguments[1:]]).exit_code == 2
