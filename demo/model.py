"""A Llama decoder in plain PyTorch, for training and evaluating the demo models.

It computes what the Llama of transformers and of vLLM computes (a test compares the logits), and its parameters
carry the names that those expect in a checkpoint, so that saving is nothing but writing them out.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.tokenizer import MAX_LENGTH_TOKENS, VOCAB_SIZE

RMS_NORM_EPS: Final = 1e-5
ROPE_THETA: Final = 10_000.0
INIT_STD: Final = 0.02
HIDDEN_BIAS: Final = -1e4  # finite, so that padding, which sees nothing, gives no NaN


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of one model; the embedding is also the output layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


# vLLM's attention on a CPU takes head sizes of 32 and 64, among others.
SHAPES: Final[dict[str, Shape]] = {
    "small": Shape(hidden=64, layers=5, heads=2, kv_heads=2, head_dim=32, mlp=192),
    "medium": Shape(hidden=128, layers=5, heads=4, kv_heads=2, head_dim=32, mlp=384),
    "large": Shape(hidden=256, layers=6, heads=4, kv_heads=2, head_dim=64, mlp=640),
}


def rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al., RoFormer, sec. 3.2), each [length, head_dim]."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, heads, length, head_dim]; the pairs are (i, i + head_dim/2), as in Llama checkpoints."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention; q, k, v are [batch, heads, length, head_dim], `bias` is [batch, 1, queries, keys].

    Written out, because the backward pass of PyTorch's fused attention takes 40% of a training step on a CPU.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return (scores + bias).softmax(dim=-1) @ v


KVCache = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q = _rotate(self._split(self.q_proj(x)), cos, sin)
        k = _rotate(self._split(self.k_proj(x)), cos, sin)
        v = self._split(self.v_proj(x))
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        group = self.shape.heads // self.shape.kv_heads
        attended = _attend(q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), bias)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), (k, v)


class MLP(nn.Module):
    """SwiGLU feed-forward layer, as in Llama: down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=RMS_NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=RMS_NORM_EPS)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, present = self.self_attn(self.input_layernorm(x), cos, sin, bias, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), present


class Decoder(nn.Module):
    """Embedding, layers and final norm: what a checkpoint calls `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=RMS_NORM_EPS)


class Llama(nn.Module):
    """A Llama language model whose output layer is its embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rope_tables(MAX_LENGTH_TOKENS, shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(
        self, ids: Tensor, positions: Tensor, visible: Tensor, cache: KVCache | None = None
    ) -> tuple[Tensor, KVCache]:
        """Run new tokens, after those in the cache, and return their final hidden states and the longer cache.

        `ids` and `positions` are [batch, new]; `visible` [batch, new, cached + new] says which tokens each new one
        attends to (several sequences may share a row, and rows may be padded).
        """
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[positions].unsqueeze(1).to(x.dtype), self.sin[positions].unsqueeze(1).to(x.dtype)
        bias = torch.zeros(visible.shape, dtype=cos.dtype).masked_fill(~visible, HIDDEN_BIAS).unsqueeze(1)
        presents: KVCache = []
        for index, layer in enumerate(self.model.layers):
            x, present = layer(x, cos, sin, bias, None if cache is None else cache[index])
            presents.append(present)
        return self.model.norm(x), presents

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of final hidden states [..., hidden]."""
        return F.linear(hidden, self.model.embed_tokens.weight)
