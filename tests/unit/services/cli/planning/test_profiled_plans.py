"""`penstock plan cascade` and `export` on profiles of instances of several GPUs."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from controlplane.planning.cascade.plan import decode_plan
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import write_workload
from services.cli.planning.command import command
from services.cli.profiling.profile_file import encode_profile
from tests.unit.simulator.cascade.instance_profiles import profile_of
from tests.unit.simulator.cascade.short_runs import short_runs


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["cascade", *map(str, arguments)])


@pytest.mark.slow
@short_runs()
def test_profiles_of_several_gpus_are_planned_with_exported_and_found_in_kept_tables(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    sample = CascadeSample(
        scores=np.clip(rng.normal((55, 85), 12, (40, 2)), 0, 100),
        input_tokens=rng.integers(20, 400, 40),
        output_tokens=rng.integers(5, 30, (40, 2)),
        rate_per_s=4.0,
    )
    workload = tmp_path / "workload.jsonl"
    workload.write_bytes(b"\n".join(write_workload(("small", "large"), sample)))
    files = {}
    for name, profile in {
        "small": profile_of("small", 5.0),
        "wide": profile_of("large", 12.0, 4),
        "narrow": profile_of("large", 30.0, 2),
    }.items():
        files[name] = tmp_path / f"{name}.json"
        files[name].write_bytes(encode_profile(profile))
    tiers = ("--tier", f"small=profile:{files['small']}", "--tier", f"large=profile:{files['narrow']},{files['wide']}")
    goal = ("--quality", "80", "--probability", "0")
    common = ("--workload", workload, "--tables", tmp_path / "tables.json", *goal, *tiers)
    out = tmp_path / "plan.json"
    result = run(*common, "--gpus", "7", "--json", out)
    assert result.exit_code == 0, result.output
    large = decode_plan(out.read_bytes()).tiers[1]
    assert large.gpus == sum(each.count * each.tp for each in large.replicas) >= 4
    assert "(TP=4)" in result.output
    exported = CliRunner().invoke(command, ["export", str(out), "--format", "helm"])
    workers = [worker for worker in yaml.safe_load(exported.output)["workers"] if worker["model"] == "large"]
    assert [(worker["gpusPerReplica"], worker["engineArgs"]) for worker in workers] == [
        (each.tp, [f"tensor_parallel_size={each.tp}"]) for each in large.replicas
    ]
    again = run(*common, "--gpus", "7", "--json", "-")
    assert decode_plan(again.stdout.strip().encode()) == decode_plan(out.read_bytes())
    assert " 0 tables simulated" in again.stderr
    too_few = run(*common, "--gpus", "1")
    assert too_few.exit_code == 2
    assert "takes 2 GPUs (TP=2)" in too_few.output
