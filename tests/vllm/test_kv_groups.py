"""Which models' KV moves block by block, by vLLM's own description of their KV cache; the others say why not."""

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from engine_worker.engines.vllm.connector.kv_groups import movement_obstacle

pytestmark = pytest.mark.vllm

SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=16, dtype=torch.float32)
STATE = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def obstacle(*specs: KVCacheSpec) -> str:
    """Of a model with these groups of layers."""
    groups = [KVCacheGroupSpec([f"layer-{number}"], spec) for number, spec in enumerate(specs)]
    return movement_obstacle(KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=groups))


def alike(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    layers = {f"layer-{number}": spec for number, spec in enumerate(specs)}
    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=layers)


def test_full_and_latent_attention_move() -> None:
    assert [obstacle(spec) for spec in (FULL, LATENT, alike(FULL, FULL), alike(LATENT, LATENT))] == [""] * 4


def test_sliding_windows_among_full_attention_move_once_vllm_keeps_all_of_their_blocks() -> None:
    """As it does with a KV connector (`disable_hybrid_kv_cache_manager`)."""
    specs: dict[str, KVCacheSpec] = {"full": FULL, "window": WINDOW}
    unify_hybrid_kv_cache_specs(specs)
    assert obstacle(alike(*specs.values())) == ""


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (WINDOW, "SlidingWindowSpec"),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64), "ChunkedLocalAttentionSpec"),
        (RSWASpec(**SHAPE, rswa_window=64), "RSWASpec"),
        (STATE, "MambaSpec"),
        (alike(WINDOW, WINDOW), "SlidingWindowSpec"),
    ],
)
def test_layers_that_keep_a_part_of_the_context_say_so(spec: KVCacheSpec, kind: str) -> None:
    assert obstacle(spec) == f"its layers keep a part of the context only ({kind})"


def test_several_groups_of_layers_and_none_say_so() -> None:
    assert obstacle(FULL, STATE) == (
        "its KV cache has 2 groups of layers with blocks of their own (FullAttentionSpec, MambaSpec)"
    )
    assert obstacle() == "its model keeps no KV"
