"""Every benchmark runs, and prints and writes the figures that it promises. How large they are is not judged here."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.profiling.profile_file import encode_profile
from tests.mesh.running_mesh import RunningMesh
from tests.unit.simulator.cascade.instance_profiles import profile_of

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 300.0
needs_ucx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="needs UCX: pip install '.[kv]'")


class Run:
    """What one run printed, and the JSON that it wrote."""

    def __init__(self, tmp_path: Path, module: str, *options: str, run_dir: Path | None = None) -> None:
        """`run_dir`: of the mesh that it talks to, if it starts none of its own."""
        json_path = tmp_path / f"{module}.json"
        done = subprocess.run(
            (sys.executable, "-m", f"benchmarks.{module}", *options, "--json", str(json_path)),
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(run_dir or tmp_path)},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"benchmarks.{module}:\n{done.stdout}\n{done.stderr}"
        self.printed = done.stdout
        self.figures: Any = json.loads(json_path.read_text())


def are_measured(*values: float) -> bool:
    """Positive numbers: what was measured took some time, and was not divided by nothing."""
    return all(math.isfinite(value) and value > 0 for value in values)


# ---- one process, or a few that the benchmark starts


def test_cascade_planning(tmp_path: Path) -> None:
    options = ("--tiers", "2", "--replica-gpus", "2", "--gpus", "3", "--requests", "20", "--repeats", "1")
    run = Run(tmp_path, "cascade_planning", *options)
    assert json.loads(run.printed) == run.figures
    plans = run.figures["plans"]
    kinds = {(plan["gpus"], plan["minimise"], plan["gives_up"]) for plan in plans}
    assert kinds == {(3, kind, gives_up) for kind in ("slowest_tier", "end_to_end") for gives_up in (False, True)}
    assert all(are_measured(plan["cpu_s"], plan["p95_s"], plan["mean_s"]) for plan in plans)
    assert all(len(plan["shares"]) == 2 for plan in plans)


def test_frontend_cpu(tmp_path: Path) -> None:
    options = ("--rounds", "1", "--requests", "16", "--stream-tokens", "20", "--workers", "1")
    run = Run(tmp_path, "frontend_cpu", *options)
    measured = {figure["name"]: figure["cpu_us"] for figure in run.figures["figures"]}
    assert len(measured) == 6
    assert are_measured(*measured.values())
    assert measured["request, 32k characters, all new"] > measured["request, 1k characters, all new"]
    hops = run.figures["hops_us"]
    assert {name: len(parts) for name, parts in hops.items()} == {
        "request, 1k characters, all new": 6,
        "request, 32k characters, 31k seen before": 6,
        "request, 32k characters, all new": 6,
        "chunk": 5,
    }
    assert all(are_measured(*parts.values()) for parts in hops.values())
    assert "chunk, 32 streams" in run.printed


def test_load_generator_cost(tmp_path: Path) -> None:
    options = ("--rounds", "1", "--streams", "4", "--requests", "5", "--chunks", "20")
    run = Run(tmp_path, "load_generator_cost", *options)
    assert run.figures.keys() == {"penstock bench", "httpx"}
    rows = dict(re.findall(r"^\| ([a-z ]+) \| ([\d.]+) \|", run.printed, re.MULTILINE))
    assert {name: float(us) for name, us in rows.items() if name != "ratio"} == {
        name: round(figures["us_per_request"]) for name, figures in run.figures.items()
    }
    assert all(are_measured(figures["us_per_request"]) for figures in run.figures.values())
    assert all(math.isfinite(figures["us_per_chunk"]) for figures in run.figures.values())


def test_place_stream(tmp_path: Path) -> None:
    run = Run(tmp_path, "place_stream", "--instances", "8", "--blocks", "2000", "--seconds", "0.5")
    assert run.figures["instances"] == 8
    for pace in ("paced", "burst"):
        assert are_measured(*run.figures[pace].values())
    assert run.figures["paced"]["placements"] <= 101
    assert '"cpu_us_per_placement"' in run.printed


def test_placement(tmp_path: Path) -> None:
    sizes = ("--instances", "8", "--instances", "256")
    run = Run(tmp_path, "placement", "--blocks", "3000", "--runs", "1", "--decisions", "20", *sizes)
    timings = run.figures["timings"]
    assert {(timing["instances"], timing["prompt"]) for timing in timings} >= {
        (instances, prompt) for instances in (8, 256) for prompt in ("hit", "system", "cold")
    }
    assert all(0 < timing["median_cpu_us"] <= timing["p99_cpu_us"] for timing in timings)
    assert run.figures["headline"]["instances"] == 256
    assert run.figures["index_memory"]["blocks"] == 3000 // 128 * 128
    assert run.figures["sweep_after_death_cpu"]["whole_ms"] > 0
    assert "bytes per block" in run.printed


def test_predictor_batch(tmp_path: Path) -> None:
    run = Run(tmp_path, "predictor_batch", "--rounds", "1")
    assert json.loads(run.printed) == run.figures
    sizes = list(run.figures.values())
    assert [round(size["parameters"] / 1e6, 2) for size in sizes] == [8.42, 0.2]
    assert all(size["cpu_ms_by_batch"].keys() == {"1", "10", "32", "256"} for size in sizes)
    assert all(are_measured(*size["cpu_ms_by_batch"].values()) for size in sizes)


def test_rescheduler(tmp_path: Path) -> None:
    run = Run(tmp_path, "rescheduler", "--runs", "1", "--sizes", "4x8", "6x8")
    assert [(row["instances"], row["requests"]) for row in run.figures] == [(4, 8), (6, 8)]
    for row in run.figures:
        assert are_measured(row["candidates"], *(value for name, value in row.items() if name.endswith("_ms")))
    assert "(16 candidates)" in run.printed


def test_stage_partition(tmp_path: Path) -> None:
    run = Run(tmp_path, "stage_partition", "--repeats", "1", "--populations", "10")
    timings = run.figures["timings"]
    assert len(timings) == 2 * 2 * 2
    assert all(are_measured(timing["median_cpu_s"], timing["stages"], timing["quality"]) for timing in timings)
    assert [(gap["instances"], gap["populations"]) for gap in run.figures["gaps"]] == [(4, 10), (16, 10), (256, 1)]
    assert all(0 <= gap["mean"] <= gap["worst"] < 1 for gap in run.figures["gaps"])
    assert "above the optimum" in run.printed


def test_worker_stream(tmp_path: Path) -> None:
    run = Run(tmp_path, "worker_stream", "--requests", "4", "--duration-s", "0.5")
    assert json.loads(run.printed) == run.figures
    assert are_measured(*(run.figures[name] for name in ("steps_per_s", "cpu_share", "ratio_to_bare_grpc")))
    assert run.figures["parts_us_per_delta"].keys() == {"route", "encode", "size", "serialise"}
    assert are_measured(*run.figures["parts_us_per_delta"].values())
    assert math.isclose(run.figures["us_per_step"], 4 * run.figures["us_per_delta"])


# ---- KV over UCX


@needs_ucx
def test_disaggregation(tmp_path: Path) -> None:
    run = Run(tmp_path, "disaggregation", "--contexts", "512", "--repeats", "1")
    rows = run.figures["rows"]
    assert [json.loads(line) for line in run.printed.splitlines()] == rows
    assert [(row["prompt_tokens"], row["instances"]) for row in rows] == [(512, 1), (512, 2)]
    assert all(are_measured(row["ttft_ms_median"], row["longest_token_gap_ms_median"]) for row in rows)
    assert rows[0]["moved_kv_blocks"] == 0
    assert rows[1]["moved_kv_blocks"] >= 512 // 16


@needs_ucx
def test_kv_throughput(tmp_path: Path) -> None:
    cases = ("grpc, 1 MiB messages", "agent shm, contiguous", "bare shm, polling, 1 MiB messages")
    chosen = [word for case in cases for word in ("--case", case)]
    run = Run(tmp_path, "kv_throughput", "--rounds", "1", "--pulls", "1", "--blocks", "8", *chosen)
    assert {result["case"]["name"] for result in run.figures["results"]} == set(cases)
    assert all(are_measured(result["gb_per_s"], result["cpu_s_per_gb"]) for result in run.figures["results"])
    assert run.figures["bytes"] == 8 * 2**20
    assert are_measured(run.figures["headline"]["times_grpc"], run.figures["headline"]["bare_over_agent"])
    assert all(case in run.printed for case in cases)


@needs_ucx
def test_migration_gap(tmp_path: Path) -> None:
    plot_path = tmp_path / "gap.png"
    run = Run(tmp_path, "migration_gap", "--contexts", "512", "--repeats", "1", "--plot", str(plot_path))
    assert json.loads(run.printed) == run.figures
    rows = run.figures["rows"]
    assert [(row["context_tokens"], row["mode"]) for row in rows] == [(512, "live"), (512, "stop_and_copy")]
    assert all(are_measured(row["median_token_gap_ms"], row["gap_ms_max"]) for row in rows)
    assert all(blocks >= 512 // 16 for row in rows for blocks in row["blocks"])
    assert plot_path.read_bytes().startswith(b"\x89PNG")


# ---- a whole mesh


@needs_ucx
def test_rescheduling_live(tmp_path: Path) -> None:
    options = ("--requests", "8", "--rate", "20", "--rounds", "1", "--time-scale", "0.25")
    run = Run(tmp_path, "rescheduling_live", *options)
    medians = run.figures["medians"]
    assert medians.keys() == {"off", "current"}
    for figures in medians.values():
        assert are_measured(figures["step_ms_median"], figures["latency_per_token_ms_p99"], figures["seconds"])
    assert medians["off"]["moved"] == 0
    assert all(mode in run.printed for mode in medians)


@pytest.fixture(scope="module")
def three_tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    models = [word for tier in ("small", "medium", "large") for word in ("--model", f"demo-{tier}:1")]
    running = RunningMesh(tmp_path_factory.mktemp("three"), "--engine", "simulated", *models)
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def test_cascade_live(tmp_path: Path, three_tiers: RunningMesh) -> None:
    profiles = []
    for tier, step_ms in (("small", 1.0), ("medium", 2.0), ("large", 3.0)):
        profiles.append(tmp_path / f"{tier}.json")
        profiles[-1].write_bytes(encode_profile(profile_of(f"demo-{tier}", step_ms)))
    options = ("--quality", "0", "--calibrate", "8", "--test", "4")
    run_dir = three_tiers.output_path.parent
    where = ("--url", three_tiers.url, "--profiles", *map(str, profiles))
    run = Run(tmp_path, "cascade_live", *where, *options, run_dir=run_dir)
    assert json.loads(run.printed) == run.figures
    (result,) = run.figures["results"]
    assert (result["target"], result["tests"]) == (0, 4)
    assert are_measured(*(result[name] for name in ("latency_s", "latency_large_s", "throughput_per_s")))
    assert math.isclose(sum(result["shares"].values()), 1)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make install")
def test_prediction_overhead(tmp_path: Path) -> None:
    run = Run(tmp_path, "prediction_overhead", "--model", "demo-small", "--rounds", "1")
    assert run.figures["rounds"] == 1
    assert are_measured(run.figures["decode_step_cpu_ms"], run.figures["hook_cpu_ms"], run.figures["predictions"])
    assert run.figures["prediction_cpu_ms"].keys() == {"engine", "worker", "predictor"}
    assert "decode_step_cpu_ms" in run.printed
