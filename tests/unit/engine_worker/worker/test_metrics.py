"""What a worker says under vLLM's names."""

import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.instance import LoadReport
from engine_worker.metrics import GaugeCollector, Gauges

LOAD = LoadReport(
    running_requests=4,
    queued_requests=3,
    kv_blocks_used=25,
    prefilled_tokens_total=1000,
    engine_hit_tokens_total=600,
    host_hit_tokens_total=50,
    disk_hit_tokens_total=7,
)
GAUGES = Gauges(
    model="m",
    load=LOAD,
    kv_blocks=100,
    block_tokens=16,
    max_model_len_tokens=640,
    cached_blocks=0,
    pulling_requests=2,
    streams=0,
    hung=False,
    host_blocks=0,
    disk_blocks=0,
    host_evictions=0,
    host_corrupt=0,
    disk_evictions=0,
    disk_corrupt=0,
    is_immovable=False,
    transfers=None,
)


def read(name: str, *, is_served: bool = False, **labels: str) -> float | None:
    registry = CollectorRegistry()
    GaugeCollector(lambda: GAUGES, registry, is_served=is_served)
    return registry.get_sample_value(f"vllm:{name}", {"engine": "0", "model_name": "m", **labels})


def test_all_that_wait_are_waiting_and_told_apart() -> None:
    assert (read("num_requests_running"), read("kv_cache_usage_perc")) == (4, 0.25)
    assert read("num_requests_waiting") == 5
    assert read("num_requests_waiting_by_reason", reason="capacity") == 3
    assert read("num_requests_waiting_by_reason", reason="deferred") == 2


@pytest.mark.parametrize(
    ("source", "tokens"), [("local_compute", 1000), ("local_cache_hit", 600), ("external_kv_transfer", 57)]
)
def test_tokens_of_prompts_come_from_somewhere(source: str, tokens: int) -> None:
    assert read("prompt_tokens_by_source_total", source=source) == tokens


@pytest.mark.parametrize(("source", "tokens"), [("device", 600), ("host", 50), ("disk", 7)])
def test_cached_tokens_come_from_a_tier(source: str, tokens: int) -> None:
    assert read("prompt_tokens_cached_by_source_total", source=source) == tokens


def test_the_cache_is_described_as_vllm_does() -> None:
    size = {"block_size": "16", "num_gpu_blocks": "100", "kv_cache_size_tokens": "1600"}
    assert read("cache_config_info", **size, kv_cache_max_concurrency="2.5") == 1


def test_what_a_server_says_itself_is_not_said_twice() -> None:
    assert read("prompt_tokens_by_source_total", is_served=True, source="local_compute") is None
    size = {"block_size": "16", "num_gpu_blocks": "100", "kv_cache_size_tokens": "1600"}
    assert read("cache_config_info", is_served=True, **size, kv_cache_max_concurrency="2.5") is None
    assert read("num_requests_waiting", is_served=True) == 5
