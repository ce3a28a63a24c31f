"""What of a model's public configuration its cost follows from."""

from dataclasses import dataclass

from mesh.errors import ConfigurationError

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of a weight by number format. fp4 (NVFP4): 4 bits, and an 8-bit scale for each 16 weights."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts that take the place of a dense MLP."""

    count: int
    active: int
    """Experts that each token is sent to."""
    intermediate_size: int
    shared: int = 0
    """Experts of the same size that see every token."""
    dense_layers: int = 0
    """Layers at the start that have a dense MLP instead."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): what is cached is one compressed vector a token."""

    query_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def cached_elements(self) -> int:
        """Elements that are cached per token and layer."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product of activations [tokens, inputs] with weights [inputs, outputs], `copies` of it in a step."""

    inputs: int
    outputs: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The sizes of a decoder-only transformer, from which cost models derive its weights, KV and matrix products."""

    name: str
    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary_tokens: int
    max_context_tokens: int
    weight_dtype: str = "bf16"
    tied_embeddings: bool = False
    gated_mlp: bool = True
    """Three matrices (gate, up, down) rather than two."""
    experts: Experts | None = None
    latent: LatentAttention | None = None

    @property
    def dense_mlp_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.experts.dense_layers if self.experts else self.layers

    @property
    def expert_layers(self) -> int:
        """Number of layers with routed experts."""
        return self.layers - self.dense_mlp_layers

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer: gate, up and down projection."""
        return 3 * self.hidden_size * self.experts.intermediate_size if self.experts else 0

    @property
    def parameters(self) -> int:
        """All weights of the matrices; norms and biases (below 0.1 %) are left out."""
        dense = sum(gemm.inputs * gemm.outputs * gemm.copies for gemm in self.gemms(tensor_parallel=1))
        embedding = 0 if self.tied_embeddings else self.vocabulary_tokens * self.hidden_size
        output = self.vocabulary_tokens * self.hidden_size
        routed = self.expert_layers * self.experts.count * self.expert_parameters if self.experts else 0
        return dense + embedding + output + routed

    def weight_bytes(self, dtype: str | None = None) -> float:
        """Of the whole model in the given number format; embeddings stay in bf16, as deployments keep them."""
        tables = (1 if self.tied_embeddings else 2) * self.vocabulary_tokens * self.hidden_size
        return (self.parameters - tables) * WEIGHT_BYTES[dtype or self.weight_dtype] + tables * WEIGHT_BYTES["bf16"]

    def kv_bytes_per_token(self, tensor_parallel: int = 1, element_bytes: float = 2.0) -> float:
        """KV of one token on ONE device. Heads that cannot be divided further are replicated, and so is a latent."""
        if self.latent:
            return self.layers * self.latent.cached_elements * element_bytes
        heads = max(1, self.kv_heads // tensor_parallel)
        return self.layers * 2 * heads * self.head_dim * element_bytes

    def gemms(self, tensor_parallel: int) -> tuple[Gemm, ...]:
        """What ONE device multiplies for every token of a step: all but routed experts and the output head."""
        mlp = self.intermediate_size // tensor_parallel
        up = (2 if self.gated_mlp else 1) * mlp
        gemms = [*self._attention_gemms(tensor_parallel)]
        if self.dense_mlp_layers:
            gemms += [
                Gemm(self.hidden_size, up, self.dense_mlp_layers),
                Gemm(mlp, self.hidden_size, self.dense_mlp_layers),
            ]
        if self.experts:
            gemms.append(Gemm(self.hidden_size, self.experts.count, self.expert_layers))  # the router
            shared = self.experts.shared * self.experts.intermediate_size // tensor_parallel
            if shared:
                gemms += [
                    Gemm(self.hidden_size, 2 * shared, self.expert_layers),
                    Gemm(shared, self.hidden_size, self.expert_layers),
                ]
        return tuple(gemms)

    def _attention_gemms(self, tensor_parallel: int) -> tuple[Gemm, ...]:
        heads = self.attention_heads // tensor_parallel
        if latent := self.latent:
            down = latent.query_rank + latent.cached_elements
            return (
                Gemm(self.hidden_size, down, self.layers),
                Gemm(latent.query_rank, heads * (latent.nope_dim + latent.rope_dim), self.layers),
                Gemm(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), self.layers),
                Gemm(heads * latent.value_dim, self.hidden_size, self.layers),
            )
        kv_heads = max(1, self.kv_heads // tensor_parallel)
        return (
            Gemm(self.hidden_size, (heads + 2 * kv_heads) * self.head_dim, self.layers),
            Gemm(heads * self.head_dim, self.hidden_size, self.layers),
        )

    def check_tensor_parallel(self, tensor_parallel: int) -> None:
        """Raises `ConfigurationError` where the heads cannot be divided so."""
        if tensor_parallel < 1 or self.attention_heads % tensor_parallel:
            divisors = [tp for tp in (1, 2, 4, 8, 16) if self.attention_heads % tp == 0]
            raise ConfigurationError(
                f"{self.name} has {self.attention_heads} attention heads, which {tensor_parallel} devices cannot "
                f"share: choose a tensor parallelism of {', '.join(map(str, divisors))}"
            )
