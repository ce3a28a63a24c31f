"""vLLM's own parser looks at every engine argument that the worker has no setting for."""

from pathlib import Path

import pytest

from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import ConfigurationError

pytestmark = pytest.mark.vllm


def test_every_kind_of_argument_is_read_as_vllm_reads_it() -> None:
    from engine_worker.engines.vllm.arguments import parse_others

    given = (
        "quantization=fp8",
        "enable_lora=true",
        "trust_remote_code=false",
        "max_loras=3",
        "lora_target_modules=a,b",
        'speculative_config={"method": "ngram", "num_speculative_tokens": 2}',
        "pooler_config.seq_pooling_type=MEAN",
    )
    parsed = parse_others(given)
    assert parsed.pop("pooler_config").seq_pooling_type == "MEAN"
    assert parsed == {
        "quantization": "fp8",
        "enable_lora": True,
        "trust_remote_code": False,
        "max_loras": 3,
        "lora_target_modules": ["a", "b"],
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("max_lorasx=2", "did you mean max_loras"),
        ("tensor_paralel_size=2", "did you mean tensor_parallel_size"),
        ("max_loras=two", "invalid int value: 'two'"),
        ("runner=fly", "invalid choice: 'fly'"),
        ("enable_lora=maybe", "it is true or false"),
        ("model=x", "the mesh sets model itself"),
        ("kv_transfer_config={}", "requests move by it"),
    ],
)
def test_what_is_wrong_is_told(argument: str, reason: str) -> None:
    from engine_worker.engines.vllm.arguments import parse_others

    with pytest.raises(ConfigurationError, match=reason):
        parse_others((argument,))


@pytest.mark.parametrize(("given", "mode"), [((), "mistral"), (("tokenizer_mode=hf",), "hf")])
def test_a_repository_of_mistrals_is_read_by_its_own_library(tmp_path: Path, given: tuple[str, ...], mode: str) -> None:
    from engine_worker.engines.vllm.arguments import KvEndpoints, engine_arguments

    for name in ("tekken.json", "params.json"):
        (tmp_path / name).write_text("{}")
    settings = VllmSettings(str(tmp_path), others=given)
    assert engine_arguments(settings, "cpu", KvEndpoints("tcp://a", "tcp://b", None)).tokenizer_mode == mode


def test_what_the_mesh_sets_itself_are_arguments_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engine_worker.engines.vllm.arguments import MESH_SETS

    assert set(MESH_SETS) - set(VllmSettings.__slots__) <= set(AsyncEngineArgs.__dataclass_fields__)
