"""What an attached server says of itself is passed on, and nothing else of it."""

from prometheus_client import CollectorRegistry, generate_latest

from engine_worker.engines.attached.data_parallel import DataParallelAttached
from engine_worker.engines.attached.engine import AttachedEngine
from engine_worker.engines.served_metrics import ServerMetricsCollector, is_served
from engine_worker.engines.simulated import SimulatedEngine

TEXT = """# HELP python_info Python
# TYPE python_info gauge
python_info{version="3.12"} 1.0
# HELP vllm:num_requests_running Requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/models/m"} 3.0
# HELP vllm:iteration_tokens_total Tokens
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="1",le="1.0",model_name="/models/m"} 2.0
vllm:iteration_tokens_total_bucket{engine="1",le="+Inf",model_name="/models/m"} 5.0
vllm:iteration_tokens_total_count{engine="1",model_name="/models/m"} 5.0
vllm:iteration_tokens_total_sum{engine="1",model_name="/models/m"} 40.0
# HELP vllm:iteration_tokens_total_created Tokens
# TYPE vllm:iteration_tokens_total_created gauge
vllm:iteration_tokens_total_created{engine="1",model_name="/models/m"} 1.7e+09
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="/models/m",source="local_compute"} 7.0
"""


def passed_on(text: str) -> list[str]:
    registry = CollectorRegistry()
    ServerMetricsCollector(lambda: text, "m", registry)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_what_cannot_be_measured_from_outside_is_passed_on_under_the_mesh_s_name() -> None:
    assert passed_on(TEXT) == [
        'vllm:iteration_tokens_total_bucket{engine="1",le="1.0",model_name="m"} 2.0',
        'vllm:iteration_tokens_total_bucket{engine="1",le="+Inf",model_name="m"} 5.0',
        'vllm:iteration_tokens_total_count{engine="1",model_name="m"} 5.0',
        'vllm:iteration_tokens_total_sum{engine="1",model_name="m"} 40.0',
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 7.0',
    ]


def test_a_server_without_such_metrics_has_none() -> None:
    assert passed_on("") == passed_on("sglang:num_running_reqs 3.0\n") == []


def test_text_that_is_no_metrics_costs_nothing_but_itself() -> None:
    broken = 'vllm:iteration_tokens_total_sum{engine="1" what\n' + TEXT
    assert passed_on(broken) == []


def test_attached_engines_are_servers_and_others_are_not() -> None:
    assert [hasattr(kind, "server_metrics") for kind in (AttachedEngine, DataParallelAttached)] == [True, True]
    assert not is_served(SimulatedEngine.__new__(SimulatedEngine))
