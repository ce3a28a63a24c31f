"""What is said to a server and read from it, in vLLM's own formats."""

import json
from typing import Any

import pytest

from controlplane.model.request import EngineRequest, FinishReason, SamplingParams
from engine_worker.engines.attached import wire
from engine_worker.engines.attached.advice import advice
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.attached.wire import Abilities, ServedModel
from engine_worker.engines.vllm.checkpoint import Vocabulary
from engine_worker.engines.vllm.connector.endpoint import of_core
from engine_worker.engines.vllm.connector.settings import connector_settings
from mesh.errors import ConfigurationError, EngineFailed

VLLM = Abilities(is_vllm=True, takes_tokens=True, tells_tokens=True)
OTHER = Abilities(is_vllm=False, takes_tokens=False, tells_tokens=False)
VOCABULARY = Vocabulary(size=640, eos_token_ids=(2,))


def body(sampling: SamplingParams, abilities: Abilities = VLLM, **more: object) -> dict[str, object]:
    request = EngineRequest("r", (7, 8, 9), sampling, **more)  # type: ignore[arg-type]
    return wire.completion_body(request, "m", abilities, VOCABULARY, [7, 8, 9, *request.emitted_token_ids])


def test_neutral_values_are_said_because_the_server_may_have_others() -> None:
    assert body(SamplingParams(max_tokens=5)) == {
        "model": "m",
        "prompt": [7, 8, 9],
        "stream": True,
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [2],
        "return_token_ids": True,
        "add_special_tokens": False,
    }


def test_what_goes_on_is_said_as_what_is_left() -> None:
    told = body(SamplingParams(max_tokens=5, min_tokens=4, logprobs=3), emitted_token_ids=(11, 12), cache_salt="s")
    assert (told["prompt"], told["max_tokens"], told["min_tokens"]) == ([7, 8, 9, 11, 12], 3, 2)
    assert (told["logprobs"], told["return_tokens_as_token_ids"], told["cache_salt"]) == (3, True, "s")


def test_another_server_hears_openais_parameters_only() -> None:
    told = body(SamplingParams(max_tokens=5, temperature=0.5, logit_bias=((7, 2.0),)), OTHER)
    assert set(told) == {
        *("model", "prompt", "stream", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
        "logit_bias",
    }


def test_logprobs_are_read_by_token_id_best_first() -> None:
    choice = {
        "text": "x",
        "token_ids": [9],
        "logprobs": {
            "tokens": ["token_id:9"],
            "token_logprobs": [-3.0],
            "top_logprobs": [{"token_id:9": -3.0, "token_id:4": -0.5, "token_id:5": -1.0}],
        },
        "finish_reason": "stop",
    }
    chunk = wire.parse_chunk(json.dumps({"choices": [choice]}).encode(), SamplingParams(max_tokens=9, logprobs=2))
    assert chunk is not None
    assert (chunk.token_ids, chunk.finish_reason) == ((9,), FinishReason.STOP)
    (position,) = chunk.logprobs
    assert (position.chosen.token_id, position.chosen.logprob) == (9, -3.0)
    assert [each.token_id for each in position.top] == [4, 5]


def test_named_tokens_are_asked_for_and_read_as_the_server_tells_them() -> None:
    sampling = SamplingParams(max_tokens=9, logprobs=0, logprob_token_ids=(9, 5, 4))
    told = body(sampling)
    assert (told["logprobs"], told["logprob_token_ids"]) == (0, [9, 5, 4])
    assert told["return_tokens_as_token_ids"]
    top = {"token_id:9": -3.0, "token_id:5": -1.0, "token_id:4": -0.5}
    logprobs = {"tokens": ["token_id:9"], "token_logprobs": [-3.0], "top_logprobs": [top]}
    choice = {"text": "x", "token_ids": [9], "logprobs": logprobs, "finish_reason": None}
    chunk = wire.parse_chunk(json.dumps({"choices": [choice]}).encode(), sampling)
    assert chunk is not None
    assert [each.token_id for each in chunk.logprobs[0].top] == [9, 5, 4]


def test_usage_brings_nothing_and_an_error_in_mid_stream_is_one() -> None:
    assert wire.parse_chunk(b'{"choices": [], "usage": {"total_tokens": 3}}', None) is None
    with pytest.raises(wire.StreamError, match="Internal") as raised:
        wire.parse_chunk(b'{"error": {"message": "Internal server error", "code": 500}}', None)
    assert not raised.value.is_request
    with pytest.raises(EngineFailed, match="no chunk"):
        wire.parse_chunk(b"<html>", None)


def test_errors_are_read_in_every_form() -> None:
    assert wire.error_of(400, b'{"error": {"message": "too long", "code": 400}}').is_request
    assert wire.error_of(404, b'{"detail": "Not Found"}').reason == "{'detail': 'Not Found'}"
    assert "nothing besides" in str(wire.error_of(502, b""))


def test_models_that_are_adapters_are_not_chosen() -> None:
    entries = [
        {"id": "base", "root": "/models/base", "parent": None, "max_model_len": 4096, "owned_by": "vllm"},
        {"id": "lora", "root": "/models/lora", "parent": "base", "max_model_len": None, "owned_by": "vllm"},
    ]
    models = wire.served_models(json.dumps({"data": entries}).encode())
    assert models == (ServedModel("base", "/models/base", 4096, is_vllm=True),)
    with pytest.raises(ConfigurationError, match="it has base"):
        wire.choose_model(models, "lora")
    with pytest.raises(EngineFailed, match="no list of models"):
        wire.served_models(b"[]")


def test_metrics_of_several_engines_are_added_up() -> None:
    text = """# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="200"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="200"} 1.0
process_start_time_seconds 1.7e+09
"""
    metrics = wire.parse_metrics(text)
    assert (metrics.running_requests, metrics.waiting_requests, metrics.preemptions_total) == (5, 1, 4)
    assert metrics.kv_usage == pytest.approx(0.3)
    assert (metrics.block_size, metrics.kv_blocks, metrics.started_s) == (16, 200, 1.7e9)
    second = wire.parse_metrics(text, core=1)
    assert (second.running_requests, second.waiting_requests, second.preemptions_total) == (2, 0, 0)
    assert second.kv_usage == pytest.approx(0.1)
    assert (second.cores, second.kv_blocks, second.started_s) == (2, 200, 1.7e9)


def _option(told: str) -> Any:
    return json.loads(told[told.index("'{") + 1 : told.index("}'") + 1])


def test_the_advice_names_the_flags_for_this_server() -> None:
    moving, told = advice(AttachedSettings("http://gpu-1:8000"), VLLM, 1)
    assert "--kv-events tcp://gpu-1:5557" in told
    assert _option(told)["endpoint"] == "tcp://*:5557"
    config = _option(moving)
    assert config["kv_connector"] == "PenstockConnector"
    control = config["kv_connector_extra_config"]["control"]
    assert f"--control {control}" in moving
    assert connector_settings(
        config["kv_connector_extra_config"], model="m", device="cpu", is_spread=False, token=""
    ).listens
    assert len(advice(AttachedSettings("http://gpu-1:8000", control=control), VLLM, 1)) == 1, "it moves already"
    knows = advice(AttachedSettings("http://gpu-1:8000", kv_events="tcp://gpu-1:5557"), VLLM, 1)
    assert not any("kv-events-config" in paragraph for paragraph in knows)
    assert any("by text" in paragraph for paragraph in advice(AttachedSettings("http://a"), OTHER, 0))


def test_the_advice_for_several_cores_keeps_their_ports_apart() -> None:
    *_, told, cores = advice(AttachedSettings("http://gpu-1:8000"), VLLM, 4)
    assert "data_parallel_size=4" in cores
    events, replay = _option(told)["endpoint"], _option(told)["replay_endpoint"]
    ports = [of_core(endpoint, core) for endpoint in (events, replay) for core in range(4)]
    assert len(set(ports)) == 8
    both = AttachedSettings("http://gpu-1:8000", kv_events=events, data_parallel_size=4)
    assert not any("engine cores" in paragraph for paragraph in advice(both, VLLM, 4))
