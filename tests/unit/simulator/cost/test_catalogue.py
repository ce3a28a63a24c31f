"""The catalogue: published sizes come out, and what does not fit is refused with a reason."""

import pytest

from mesh.errors import ConfigurationError
from simulator.cost.catalogue import DEVICES, MODELS, deployment_for, instance_for
from simulator.cost.roofline.matrices import touched_experts


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-2-7B", 6.74),
        ("Llama-2-70B", 68.98),
        ("Llama-3.2-3B", 3.21),
        ("Llama-3.1-8B", 8.03),
        ("Llama-3.1-70B", 70.55),
        ("Llama-3.1-405B", 405.85),
        ("Qwen2-7B", 7.62),
        ("Qwen2.5-14B", 14.77),
        ("Qwen3-30B-A3B", 30.53),
        ("Mixtral-8x7B", 46.70),
        ("DeepSeek-R1", 671.03),
    ],
)
def test_models_have_the_parameters_that_their_publishers_state(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_kv_of_a_token() -> None:
    assert MODELS["Llama-3.1-8B"].kv_bytes_per_token() == 128 * 1024
    assert MODELS["DeepSeek-R1"].kv_bytes_per_token() == 61 * 576 * 2
    qwen = MODELS["Qwen3-30B-A3B"]
    assert qwen.kv_bytes_per_token(4) == qwen.kv_bytes_per_token(8), "four KV heads are replicated beyond four devices"


def test_memory_left_after_the_weights_holds_kv() -> None:
    config, _ = instance_for("Llama-3.1-8B", "A100-80G", tp=1)
    kv_gigabytes = config.kv_blocks * config.block_bytes / 1e9
    assert 85 * 0.9 - 16.1 - 3 < kv_gigabytes < 85 * 0.9 - 16.1 - 2
    double, _ = instance_for("Llama-3.1-8B", "A100-80G", tp=2)
    assert double.kv_blocks > 2 * config.kv_blocks, "the weights are shared, not doubled"


def test_names_are_found_whatever_their_case() -> None:
    assert instance_for("llama-3.1-8b", "h100")[0] == instance_for("Llama-3.1-8B", "H100")[0]


@pytest.mark.parametrize(
    ("model", "device", "tp", "expected"),
    [
        ("GPT-9", "H100", 1, "no model 'GPT-9'"),
        ("Llama-3.1-8B", "V100", 1, "no device 'V100'"),
        ("Llama-3.1-70B", "H100", 1, "leaves no room for KV"),
        ("Llama-3.1-8B", "H100", 3, "32 attention heads"),
    ],
)
def test_what_cannot_be_is_refused(model: str, device: str, tp: int, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        instance_for(model, device, tp)


def test_number_formats_are_widened_where_the_device_lacks_them() -> None:
    assert DEVICES["H100"].compute_dtype("fp4") == "fp8"
    assert DEVICES["A100-80G"].compute_dtype("fp8") == "bf16"
    assert deployment_for("DeepSeek-R1", "H200", 8).dtype == "fp8"


def test_experts_are_covered_as_the_batch_grows() -> None:
    experts = MODELS["Qwen3-30B-A3B"].experts
    assert experts is not None
    assert touched_experts(experts, 1) == pytest.approx(8)
    assert touched_experts(experts, 16) == pytest.approx(128 * (1 - (120 / 128) ** 16))
    assert touched_experts(experts, 2048) == pytest.approx(128)
