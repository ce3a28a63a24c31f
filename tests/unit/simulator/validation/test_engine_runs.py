"""Which measured runs a folder has, on which cards, and how much KV their engines reported."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh.errors import ConfigurationError
from services.cli.validate import command
from simulator.profiles.choice import cost_from_tables
from simulator.profiles.folder import ProfileFolder
from simulator.validation.engine_runs import EngineRun, engine_runs, simulate_run

ARGUMENTS = {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_num_seqs": 64, "max_num_batched_tokens": 1024}


def folder_with(path: Path, card: str, **of_run: object) -> ProfileFolder:
    meta = {"Llama-3.1-8B": {"engine_kwargs": ARGUMENTS, **of_run}}
    (path / f"vllm_measured_meta_{card}.json.gz").write_bytes(gzip.compress(json.dumps(meta).encode()))
    (path / f"vllm_measured_requests_{card}.csv.gz").write_bytes(gzip.compress(b"model\n"))
    return ProfileFolder(path)


def test_runs_of_any_card_are_found_with_what_their_engines_reported(tmp_path: Path) -> None:
    folder_with(tmp_path, "RTXPRO6000")
    folder = folder_with(tmp_path, "RTX4090", num_gpu_blocks=2000)
    starved, other = engine_runs(folder)
    assert starved == EngineRun("Llama-3.1-8B", "Llama-3.1-8B", "RTX-4090", 1, 1, 64, 1024, kv_tokens=32_000)
    assert (other.device, other.kv_tokens) == ("RTX-PRO-6000", None)
    told = engine_runs(folder, {"Llama-3.1-8B/RTX-PRO-6000": 500_000, "Llama-3.1-8B": 1})
    assert [run.kv_tokens for run in told] == [1, 500_000], "what the operator says holds, the closest name first"


def test_what_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no measured runs"):
        engine_runs(ProfileFolder(tmp_path))
    with pytest.raises(ConfigurationError, match=r"no run is called Llama; there are Llama-3.1-8B, .*/RTX-4090"):
        engine_runs(folder_with(tmp_path, "RTX4090"), {"Llama": 5})
    with pytest.raises(ConfigurationError, match="does not say how it was set up"):
        engine_runs(folder_with(tmp_path, "RTX4090", engine_kwargs={}))
    with pytest.raises(ConfigurationError, match="a card that the catalogue lacks"):
        engine_runs(folder_with(tmp_path, "ABACUS"))


def test_the_kernel_tables_of_a_run_are_those_of_its_own_card(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "RTX4090", num_gpu_blocks=2000)
    with pytest.raises(ConfigurationError, match="llmservingsim_dense_RTX4090"):
        simulate_run(folder, engine_runs(folder)[0], [])
    with pytest.raises(ConfigurationError, match="llmservingsim_dense_RTX4090D"):
        cost_from_tables(folder, "Llama-3.1-8B", "RTX-4090D", 1, "llmservingsim")


@pytest.mark.parametrize("value", ["Llama", "Llama=", "=5", "Llama=0", "Llama=many"])
def test_a_kv_size_that_is_none_is_a_usage_error(tmp_path: Path, value: str) -> None:
    result = CliRunner().invoke(command, ["--data", str(tmp_path), "--kv-tokens", value])
    assert result.exit_code == 2
    assert "MODEL=TOKENS" in result.output
