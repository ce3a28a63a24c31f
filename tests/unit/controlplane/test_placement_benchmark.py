"""The placement benchmark runs and reports what it promises; its numbers are not judged here."""

import json

from benchmarks.placement import measure


def test_the_benchmark_reports_its_numbers() -> None:
    result = json.loads(json.dumps(measure(blocks=5000, runs=1, decisions=20, seed=1, sizes=(8, 256))))
    assert {(t["instances"], t["prompt"]) for t in result["timings"]} >= {
        (instances, prompt) for instances in (8, 256) for prompt in ("hit", "system", "cold")
    }
    assert all(0 < t["median_cpu_us"] <= t["p99_cpu_us"] for t in result["timings"])
    assert result["headline"]["instances"] == 256
    assert result["index_memory"]["blocks"] == 5000 // 128 * 128
    assert result["sweep_after_death_cpu"]["whole_ms"] > 0
