"""Models by name, from the configurations that their publishers ship (config.json on the model's page)."""

from dataclasses import replace

from simulator.cost.spec.model import Experts, LatentAttention, ModelSpec


def _dense(
    name: str,
    layers: int,
    hidden_size: int,
    heads: tuple[int, int],
    intermediate_size: int,
    vocabulary_tokens: int,
    max_context_tokens: int,
    *,
    head_dim: int = 128,
    tied_embeddings: bool = False,
    gated_mlp: bool = True,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        layers=layers,
        hidden_size=hidden_size,
        attention_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocabulary_tokens=vocabulary_tokens,
        max_context_tokens=max_context_tokens,
        tied_embeddings=tied_embeddings,
        gated_mlp=gated_mlp,
    )


def _experts(base: ModelSpec, experts: Experts) -> ModelSpec:
    return replace(base, experts=experts)


_LLAMA_31_8B = _dense("Llama-3.1-8B", 32, 4096, (32, 8), 14336, 128_256, 131_072)
_LLAMA_31_70B = _dense("Llama-3.1-70B", 80, 8192, (64, 8), 28672, 128_256, 131_072)
_QWEN2_7B = _dense("Qwen2-7B", 28, 3584, (28, 4), 18944, 152_064, 131_072)
_QWEN25_14B = _dense("Qwen2.5-14B", 48, 5120, (40, 8), 13824, 152_064, 131_072)

_MODELS = (
    _dense("Llama-2-7B", 32, 4096, (32, 32), 11008, 32_000, 4096),
    _dense("Llama-2-70B", 80, 8192, (64, 8), 28672, 32_000, 4096),
    _dense("Llama-3.2-1B", 16, 2048, (32, 8), 8192, 128_256, 131_072, head_dim=64, tied_embeddings=True),
    _dense("Llama-3.2-3B", 28, 3072, (24, 8), 8192, 128_256, 131_072, tied_embeddings=True),
    _LLAMA_31_8B,
    _LLAMA_31_70B,
    replace(_LLAMA_31_70B, name="Llama-3.3-70B"),
    _dense("Llama-3.1-405B", 126, 16384, (128, 8), 53248, 128_256, 131_072),
    # Three of four layers of the original attend within chunks of 8192 tokens; here all attend to everything.
    _experts(
        _dense("Llama-4-Scout", 48, 5120, (40, 8), 16384, 202_048, 1_048_576),
        Experts(count=16, active=1, intermediate_size=8192, shared=1),
    ),
    _dense("OPT-13B", 40, 5120, (40, 40), 20480, 50_272, 2048, tied_embeddings=True, gated_mlp=False),
    _dense("OPT-66B", 64, 9216, (72, 72), 36864, 50_272, 2048, tied_embeddings=True, gated_mlp=False),
    _QWEN2_7B,
    _QWEN25_14B,
    _dense("Qwen3-14B", 40, 5120, (40, 8), 17408, 151_936, 40_960),
    _dense("Qwen3-32B", 64, 5120, (64, 8), 25600, 151_936, 40_960),
    _experts(
        _dense("Qwen3-30B-A3B", 48, 2048, (32, 4), 6144, 151_936, 262_144),
        Experts(count=128, active=8, intermediate_size=768),
    ),
    _experts(
        _dense("Qwen3-235B-A22B", 94, 4096, (64, 4), 12288, 151_936, 262_144),
        Experts(count=128, active=8, intermediate_size=1536),
    ),
    _experts(
        _dense("Mixtral-8x7B", 32, 4096, (32, 8), 14336, 32_000, 32_768),
        Experts(count=8, active=2, intermediate_size=14336),
    ),
    ModelSpec(
        name="DeepSeek-R1",
        layers=61,
        hidden_size=7168,
        attention_heads=128,
        kv_heads=128,
        head_dim=128,
        intermediate_size=18432,
        vocabulary_tokens=129_280,
        max_context_tokens=163_840,
        weight_dtype="fp8",
        experts=Experts(count=256, active=8, intermediate_size=2048, shared=1, dense_layers=3),
        latent=LatentAttention(query_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128),
    ),
    replace(_QWEN2_7B, name="R1-Distill-Qwen-7B"),
    replace(_QWEN25_14B, name="R1-Distill-Qwen-14B"),
    replace(_LLAMA_31_8B, name="R1-Distill-Llama-8B"),
)

MODELS = {model.name: model for model in _MODELS}
