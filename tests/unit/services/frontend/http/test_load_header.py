"""ORCA's header, as vLLM writes it."""

import pytest

from services.frontend.http.load_header import load_header
from services.frontend.mesh_metrics import EngineLoad

LOAD = EngineLoad(3.0, 0.25)


@pytest.mark.parametrize(
    ("form", "header"),
    [
        ("text", "TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.25"),
        ("TEXT", "TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.25"),
        ("Json", 'JSON {"named_metrics": {"num_requests_waiting": 3.0, "kv_cache_usage_perc": 0.25}}'),
    ],
)
def test_a_format_is_written_as_vllm_does(form: str, header: str) -> None:
    assert load_header(form, LOAD) == {"endpoint-load-metrics": header}


def test_nothing_is_made_up() -> None:
    assert load_header("bin", LOAD) == load_header("text", None) == {}
