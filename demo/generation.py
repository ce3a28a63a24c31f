"""Greedy decoding of a batch of prompts with a demo model."""

from collections.abc import Sequence
from typing import Final

import torch

from demo.model import KVCache, Llama
from demo.tokenizer import EOS_ID, PAD_ID

MAX_NEW_TOKENS: Final = 512


def decode(model: Llama, prompts: Sequence[Sequence[int]], max_new_tokens: int = MAX_NEW_TOKENS) -> list[list[int]]:
    """The likeliest continuation of each prompt, up to and without EOS, or `max_new_tokens` long."""
    with torch.inference_mode():
        return _decode(model, prompts, max_new_tokens)


def _decode(model: Llama, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    width = max(map(len, prompts))
    starts = torch.tensor([width - len(prompt) for prompt in prompts])
    ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    columns = torch.arange(width + max_new_tokens)
    padding = columns < starts.unsqueeze(1)
    positions = (columns - starts.unsqueeze(1)).clamp(min=0)

    visible = torch.ones(width, width, dtype=torch.bool).tril() & ~padding[:, None, :width]
    hidden, cache = model(ids, positions[:, :width], visible)
    live = torch.arange(len(prompts))  # which prompt each row of the cache belongs to
    answers: list[list[int]] = [[] for _ in prompts]
    for column in range(width, width + max_new_tokens):
        tokens = model.logits(hidden[:, -1]).argmax(-1)
        going = tokens != EOS_ID
        live, tokens = live[going], tokens[going]
        if len(live) == 0:
            break
        for row, token in zip(live.tolist(), tokens.tolist(), strict=True):
            answers[row].append(token)
        kept: KVCache = cache if bool(going.all()) else [(k[going], v[going]) for k, v in cache]
        hidden, cache = model(
            tokens.unsqueeze(1),
            positions[live, column : column + 1],
            ~padding[live, None, : column + 1],
            kept,
        )
    return answers
