"""Costs from published tables: what each source has, and what it says of what it has not."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from mesh.errors import ConfigurationError
from simulator.cost.catalogue import instance_for
from simulator.cost.model import BatchShape, PrefillChunk
from simulator.profiles.choice import cost_from_tables
from simulator.profiles.folder import ProfileFolder

DECODE = BatchShape(decode_context_tokens=np.full(32, 800), decode_context_tokens_sum=32 * 800)
PREFILL = BatchShape((PrefillChunk(1024, 0),))


def test_distserve_formulas_are_evaluated(tmp_path: Path) -> None:
    fit = {
        "decoding_large_small_bs_threshold": 8,
        "prefill": [20.0, 0.1, 1e-5],
        "decoding_smallbs": [10.0, 1e-3, 0.5],
        "decoding_largebs": [30.0, 1e-3, 0.25],
    }
    document = {"profiler-a100-80g.distserve.json": {"facebook/opt-13b": {"1": fit}}}
    (tmp_path / "distserve_a100_profile.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))
    cost = cost_from_tables(ProfileFolder(tmp_path), "OPT-13B", "A100-80G", 1, "distserve")
    assert cost.step_ms(PREFILL) == pytest.approx(20.0 + 102.4 + 1e-5 * 1024 * 1025)
    assert cost.step_ms(DECODE) == pytest.approx(30.0 + 25.6 + 8.0)
    few = BatchShape(decode_context_tokens=np.full(4, 800), decode_context_tokens_sum=3200)
    assert cost.step_ms(few) == pytest.approx(10.0 + 3.2 + 2.0)


def test_every_source_says_why_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"llmservingsim: .*distserve: .*splitwise: "):
        cost_from_tables(ProfileFolder(tmp_path), "Mixtral-8x7B", "H100", 4)
    with pytest.raises(ConfigurationError, match="no tables are called"):
        cost_from_tables(ProfileFolder(tmp_path), "Mixtral-8x7B", "H100", 4, "mine")


@pytest.mark.data
@pytest.mark.parametrize(
    ("source", "model", "device", "tensor_parallel"),
    [
        ("llmservingsim", "Llama-3.1-8B", "RTX-PRO-6000", 1),
        ("llmservingsim", "Qwen3-32B", "RTX-PRO-6000", 2),
        ("vidur", "Llama-3.1-8B", "A100-80G", 1),
        ("vidur", "Llama-2-70B", "A100-80G", 2),
        ("vidur", "Llama-2-70B", "H100", 4),
        ("distserve", "OPT-13B", "A100-80G", 1),
        ("splitwise", "Llama-2-70B", "A100-80G", 2),
    ],
)
def test_measured_and_roofline_costs_are_of_one_order(
    source: str, model: str, device: str, tensor_parallel: int
) -> None:
    folder = os.environ.get("PENSTOCK_DATA")
    if not folder:
        pytest.skip("PENSTOCK_DATA does not name the directory of the measurements")
    cost = cost_from_tables(ProfileFolder(Path(folder)), model, device, tensor_parallel, source)
    _, roofline = instance_for(model, device, tensor_parallel)
    for batch in (DECODE, PREFILL):
        assert 0.5 < roofline.step_ms(batch) / cost.step_ms(batch) < 1.3
    run = cost.decode_run_ms(DECODE, 3)
    assert run.tolist() == [cost.step_ms(DECODE.decode_only_after(step)) for step in range(3)]
