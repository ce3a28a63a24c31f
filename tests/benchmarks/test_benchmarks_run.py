"""Every benchmark runs, and prints and writes the figures that it promises. How large they are is not judged here."""

import gzip
import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.profiling.profile_file import encode_profile
from tests.mesh.running_mesh import RunningMesh
from tests.unit.services.predictor.artefacts import make_dataset
from tests.unit.simulator.cascade.instance_profiles import profile_of

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 300.0
needs_ucx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="needs UCX: pip install '.[kv]'")
needs_gpu = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")


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


def test_host_tier(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        "host_tier",
        "--block-kib",
        "256",
        "--blocks",
        "256",
        "--directory",
        str(tmp_path),
        "--disk-directory",
        str(tmp_path),
    )
    assert all(f"{value:.2f}" in run.printed for value in run.figures.values())
    assert are_measured(*run.figures.values())


def test_online_lengths(tmp_path: Path) -> None:
    make_dataset(tmp_path / "samples", requests=150)
    run = Run(tmp_path, "online_lengths", str(tmp_path / "samples"), "--learnt-from", "100")
    (figures,) = run.figures
    assert figures["requests"] == 150
    assert figures["learnt_from"] == 100
    assert f"{figures['mae_tokens']:.1f} tokens of error after 100 requests" in run.printed
    errors = (figures["mae_tokens"], figures["frozen_mae_tokens"], *figures["baselines_mae_tokens"].values())
    assert are_measured(*errors, figures["predict_ms"], figures["learn_ms_per_request"])


def test_cascade_planning(tmp_path: Path) -> None:
    options = ("--tiers", "2", "--replica-gpus", "2", "--gpus", "3", "--requests", "20", "--repeats", "1")
    run = Run(tmp_path, "cascade_planning", *options)
    assert json.loads(run.printed) == run.figures
    plans = run.figures["plans"]
    kinds = {(plan["gpus"], plan["minimise"], plan["gives_up"]) for plan in plans}
    assert kinds == {(3, kind, gives_up) for kind in ("slowest_tier", "end_to_end") for gives_up in (False, True)}
    assert all(are_measured(plan["cpu_s"], plan["p95_s"], plan["mean_s"]) for plan in plans)
    assert all(len(plan["shares"]) == 2 for plan in plans)


def test_steady_plans(tmp_path: Path) -> None:
    options = ("--replica-gpus", "2", "--gpus", "4", "--requests", "300", "--sampled", "20", "--parts", "0.5")
    run = Run(tmp_path, "steady_plans", *options)
    assert json.loads(run.printed) == run.figures
    for row in run.figures["plans"]:
        assert row["part"] == 0.5
        assert are_measured(row["table_p95_s"], row["steady_p95_s"], row["long_p95_s"])
    assert len(run.figures["added"]) == 4
    assert all(are_measured(row["p95_s"], row["mean_s"]) for row in run.figures["added"])


def test_quality_promise(tmp_path: Path) -> None:
    rng, answers = random.Random(0), tmp_path / "answers.jsonl"
    lines: list[dict[str, Any]] = [{"rate_per_s": 1.0, "models": ["a", "b", "c"], "judge": "j", "label": "exact"}]
    for _ in range(600):
        is_right = [rng.random() < share for share in (0.5, 0.75, 0.95)]
        scores = [min(100.0, max(0.0, rng.gauss(80 if right else 50, 15))) for right in is_right]
        quality = [100.0 * right for right in is_right]
        lines.append({"input_tokens": 36, "output_tokens": [3, 3, 3], "scores": scores, "quality": quality})
    answers.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = Run(tmp_path, "quality_promise", "--demo", str(answers), "--draws", "3")
    outcomes = run.figures["outcomes"]
    assert {each["kind"] for each in outcomes} == {"promised", "mean"}
    assert all(each["draws"] == 3 >= each["planned"] >= each["below"] >= 0 for each in outcomes)
    assert sum(each["planned"] for each in outcomes) > 0
    assert all(each["data"] in run.printed for each in outcomes)


def test_gateway_cpu(tmp_path: Path) -> None:
    run = Run(tmp_path, "gateway_cpu", "--rounds", "1", "--requests", "8", "--pieces", "10")
    measured = {name: figure["cpu_us"] for name, figure in run.figures.items()}
    assert set(measured) == {"request, 1k characters, all new", "request, 32k characters, all new", "piece, 32 streams"}
    assert are_measured(*measured.values())
    assert all(name in run.printed for name in measured)


def test_cascade_speculation(tmp_path: Path) -> None:
    figures = Run(tmp_path, "cascade_speculation", "--requests", "40", "--seeds", "1").figures
    assert {each["way"] for each in figures} == {"large alone", "cascade", "speculative"}
    for each in figures:
        assert are_measured(each["mean_latency_s"], each["throughput_per_s"], each["quality"])
    cascade, speculative = (
        [each["quality"] for each in figures if each["way"] == way] for way in ("cascade", "speculative")
    )
    assert cascade == speculative, "no decision differs"


def test_fair_share(tmp_path: Path) -> None:
    run = Run(tmp_path, "fair_share", "--seeds", "2", "--duration-s", "5")
    assert {(row["step_tokens"], row["offered_shares"]) for row in run.figures["rows"]} == {
        (step_tokens, offered) for step_tokens in (2048, 512) for offered in (0.5, 0.8)
    }
    for row in run.figures["rows"]:
        assert are_measured(row["p95_alone_ms"], row["p95_fair_ms"], row["greedy_tokens_per_s"])
        assert row["p95_fair_ms"] < row["p95_first_come_ms"], "the same arrivals, in the order of shares"


def test_identity_cpu(tmp_path: Path) -> None:
    run = Run(tmp_path, "identity_cpu", "--streams", "tcp", "--rounds", "1", "--requests", "16")
    measured = {figure["role"]: (figure["insecure_us"], figure["mutual_tls_us"]) for figure in run.figures["figures"]}
    assert set(measured) == {"frontend", "scheduler", "worker", "all"}
    assert are_measured(*measured["all"])
    assert all(role in run.printed for role in measured)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make install")
def test_vllm_parts(tmp_path: Path) -> None:
    run = Run(tmp_path, "vllm_parts", "--rounds", "1", "--chats", "4")
    assert are_measured(*run.figures["start"].values())
    assert [each["characters"] for each in run.figures["chats"]] == [1_000, 8_000, 32_000]
    for each in run.figures["chats"]:
        assert are_measured(each["here_us"], each["frontend_us"], each["process_us"])
    assert "in the process" in run.printed


def test_framed_cpu(tmp_path: Path) -> None:
    run = Run(tmp_path, "framed_cpu", "--carrier", "tcp", "--rounds", "1", "--requests", "16")
    measured = run.figures["figures"]
    assert len(measured) == 15
    assert set(measured["all, 16 tokens"]) == {"grpc", "tcp"}
    assert are_measured(*measured["all, 16 tokens"].values())
    assert all(name in run.printed for name in measured)


def test_fleet(tmp_path: Path) -> None:
    small = ("--instances", "6", "--kv-blocks", "2000", "--processes", "1", "--seconds", "1", "--placements", "20")
    run = Run(tmp_path, "fleet", *small)
    assert set(run.figures["cores"]) == {"store", "monitor", "scheduler", "instances"}
    assert are_measured(*run.figures["cores"].values(), *run.figures["memory_mb"].values())
    assert are_measured(*(run.figures["report_age"][name] for name in ("median_ms", "p99_ms", "worst_ms")))
    assert run.figures["store"]["calls_per_s"]["RefreshLease"] > 0
    assert run.figures["placing"]["placements"] > 0
    assert '"control_plane_cores"' in run.printed


def test_peers(tmp_path: Path) -> None:
    """Penstock alone: the others are not there."""
    run = Run(tmp_path, "peers", "--router", "penstock", "--rounds", "1", "--share", "0.1")
    assert len(run.figures["figures"]) == 5
    for figure in run.figures["figures"]:
        assert are_measured(*(figure["medians"][part] for part in ("all", "frontend", "ttft_ms")))
        assert figure["workload"] in run.printed


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
    assert all(f"({row['candidates']} candidates)" in run.printed for row in run.figures)


def test_several_schedulers(tmp_path: Path) -> None:
    short = ("--data", str(tmp_path), "--traces", "conversations", "--scale", "20", "--instances", "4")
    short += ("--requests", "150")
    run = Run(tmp_path, "several_schedulers", *short, "--schedulers", "4", "--seeds", "1")
    alone, *several = run.figures.values()
    assert len(several) == 4
    assert alone["bounces"] == several[0]["bounces"] == 0
    assert all(are_measured(each["ttft_ms"], each["goodput_req_s"], each["req_s"]) for each in run.figures.values())
    assert "| conversations | 4 | never | off |" in run.printed


def test_stages_and_rescheduler(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.mkdir()
    rows = "".join(f"{100 + 37 * number % 900},{10 + 53 * number % 400}\n" for number in range(200))
    text = f"num_prefill_tokens,num_decode_tokens\n{rows}"
    (lengths / "sharegpt_8k_llama2.csv.gz").write_bytes(gzip.compress(text.encode()))
    short = ("--data", str(tmp_path), "--rates", "40", "--seconds", "1", "--seeds", "1")
    run = Run(
        tmp_path, "stages_and_rescheduler", *short, "--systems", "round robin", "stages by prefill and rescheduler"
    )
    assert list(run.figures) == ["40 round robin #0", "40 stages by prefill and rescheduler #0"]
    assert all(are_measured(each["normalised_ms"], each["mean_ttft_ms"]) for each in run.figures.values())
    assert run.figures["40 round robin #0"]["moved"] == 0
    assert "| 40 | stages by prefill and rescheduler |" in run.printed


def test_unevenness(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    rows = [
        f"{model},tp1,{n},1,{chunk},{kvs},{4 * kvs},{equal},{equal * (1 + 0.01 * n)}\n"
        for model in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B")
        for n in (2, 8, 32)
        for kvs in (128, 1024, 4096)
        for chunk, equal in ((0, 40.0), (64, 90.0))
    ]
    text = f"model,tp,n,nb,pc,kvs,kv_big,t_mean_us,t_skew_us\n{''.join(rows)}"
    (folder / "llmservingsim_skew_RTXPRO6000.csv.gz").write_bytes(gzip.compress(text.encode()))
    run = Run(tmp_path, "unevenness", "--data", str(tmp_path), "--every", "1")
    error = {(each["model"], each["step"], each["by"]): each["mean_absolute"] for each in run.figures["errors"]}
    assert len(error) == 2 * 2 * 3
    assert error["Qwen3-32B", "decodes only", "the fit"] < error["Qwen3-32B", "decodes only", "nothing"]
    assert run.figures["table"]["multiprocessors"] == 188
    assert "| Llama-3.1-8B | with a prompt | the rule |" in run.printed


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
@pytest.mark.parametrize(
    ("memory", "cases"),
    [
        ([], ("grpc, 1 MiB messages", "agent shm, contiguous", "bare shm, polling, 1 MiB messages")),
        pytest.param(["--gpu"], ("agent cuda, scattered", "agent pinned host, scattered"), marks=needs_gpu),
    ],
)
def test_kv_throughput(tmp_path: Path, memory: list[str], cases: tuple[str, ...]) -> None:
    chosen = [word for case in cases for word in ("--case", case)]
    run = Run(tmp_path, "kv_throughput", *memory, "--rounds", "1", "--pulls", "1", "--blocks", "8", *chosen)
    assert {result["case"]["name"] for result in run.figures["results"]} == set(cases)
    assert all(are_measured(result["gb_per_s"], result["cpu_s_per_gb"]) for result in run.figures["results"])
    assert run.figures["bytes"] == 8 * 2**20
    assert memory or are_measured(run.figures["headline"]["times_grpc"], run.figures["headline"]["bare_over_agent"])
    assert all(case in run.printed for case in cases)


@needs_gpu
def test_cuda_copies(tmp_path: Path) -> None:
    run = Run(tmp_path, "cuda_copies", "--blocks", "32", "--rounds", "1")
    assert json.loads(run.printed) == run.figures
    assert {"out, device", "in, device", "out, pinned host", "in, pinned host"} <= run.figures["gb_per_s"].keys()
    assert are_measured(*run.figures["gb_per_s"].values(), *run.figures["step_ms_median"].values())


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
    assert medians["off"]["moved"] == medians["off"]["moves_judged"] == 0
    assert medians["current"]["came_back"] == 0
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


def test_cascade_at_load(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "quality"
    folder.mkdir(parents=True)
    columns = "prompt_chars,mixtral_8x7b_correct,gpt4_1106_correct,mixtral_8x7b_response_chars,gpt4_1106_response_chars"
    with gzip.open(folder / "routellm_gsm8k.csv.gz", "wt") as lines:
        lines.write("\n".join((columns, *(f"40,{int(number % 3 > 0)},1,21,28" for number in range(120)))) + "\n")
    options = (
        "--under-way",
        "2",
        "--rounds",
        "2",
        "--requests",
        "3",
        "--judge-s",
        "0.01",
        "--instances",
        "1",
        "1",
        "1",
    )
    run = Run(tmp_path, "cascade_at_load", "--data", str(tmp_path / "data"), *options)
    results = run.figures["results"]
    assert [result["way"] for result in results] == ["large alone", "cascade", "speculative"]
    for result in results:
        assert (result["under_way"], result["requests"]) == (2, 6)
        assert are_measured(result["latency_s"], result["throughput_per_s"], result["latency_ratio"])
        assert f"{result['latency_s']:.2f} s" in run.printed
    assert results[0]["latency_ratio"] == 1


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make install")
def test_prediction_overhead(tmp_path: Path) -> None:
    run = Run(tmp_path, "prediction_overhead", "--model", "demo-small", "--rounds", "1")
    assert run.figures["rounds"] == 1
    assert are_measured(run.figures["decode_step_cpu_ms"], run.figures["hook_cpu_ms"], run.figures["predictions"])
    assert run.figures["prediction_cpu_ms"].keys() == {"engine", "worker", "predictor"}
    assert "decode_step_cpu_ms" in run.printed
