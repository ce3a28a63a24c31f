"""All of Arrow's reproduction on traces of a few requests: every row, from the same code."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.reproductions.arrow import experiment, setup
from simulator.reproductions.registry import reproduce
from simulator.reproductions.run import ReproductionRun
from simulator.reproductions.sustainable_rate import RateSearch

REQUESTS = 6


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReproductionRun:
    traces = tmp_path / "traces"
    traces.mkdir()
    rows = [
        f"2023-11-16 18:15:{number * 3 % 60:02d}.0000000,{500 + 90 * (number % 7)},{5 + number}"
        for number in range(REQUESTS)
    ]
    for name in ("azure2023_code.csv", "azure2023_conv.csv"):
        (traces / name).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(sorted(rows)) + "\n")
    lines = [
        json.dumps({"timestamp": 3000 * number, "input_length": 1000, "output_length": 10, "hash_ids": [number, 99]})
        for number in range(REQUESTS)
    ]
    (traces / "mooncake.jsonl").write_text("\n".join(lines) + "\n")
    files = ("azure2023_code.csv", "azure2023_conv.csv", "mooncake.jsonl")
    small = tuple(replace(trace, file=file) for trace, file in zip(setup.TRACES, files, strict=True))
    monkeypatch.setattr(setup, "TRACES", small)
    monkeypatch.setattr(experiment, "SCALING_TRACE", small[0])
    # One probe or two a search; what searches find has tests of its own.
    coarse = RateSearch(start_scale=20, highest_scale=20, growth=40, tolerance=100)
    monkeypatch.setattr(experiment, "_search", lambda *_: coarse)
    monkeypatch.setattr(experiment, "SWEEP", (1.0,))
    monkeypatch.setattr(experiment, "GPU_COUNTS", (4, 16))
    monkeypatch.setattr(experiment, "LOW_LOADS", (0.5,))
    return ReproductionRun(tmp_path, tmp_path / "out", seed=3, quick=True, processes=1)


@pytest.mark.slow
def test_every_claim_has_its_row_with_a_figure_or_a_reason(run: ReproductionRun) -> None:
    report = reproduce("arrow", run)
    published = [row.paper for row in report.rows if isinstance(row.paper, float)]
    assert published == [5.62, 7.78, 3.76, 4.06, 3.73, 4.14, 1.67, 4.3, 1.1, 2.4]
    assert len({row.claim for row in report.rows}) == len(report.rows)
    assert all(row.ours is not None or row.why for row in report.rows)
    assert {path.name for path in (run.out / "plots").iterdir()} == {"rates.png", "strategies.png", "scaling.png"}
    page = (run.out / "report.md").read_text()
    assert "## Setup" in page
    assert "no prefix caching" in page


def test_the_systems_are_those_of_the_paper() -> None:
    systems = setup.systems(setup.TRACES[0], seed=0)
    assert {name: system.cluster.instances for name, system in systems.items()} == {
        setup.ARROW: 8,
        setup.MINIMAL_LOAD: 8,
        setup.ROUND_ROBIN: 8,
        setup.COLOCATED_TP8: 1,
        setup.STATIC_TP4: 2,
        setup.COLOCATED_TP1: 8,
    }
    arrow = systems[setup.ARROW].parameters
    assert (arrow["ttft_ms"], arrow["tpot_ms"]) == (3000, 100)
    assert arrow["max_running_tokens"] > 100_000
