"""What pooling models do."""

from typing import Final, Literal

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""vLLM's names: a vector, or the scores of classes; of the whole prompt, or of each of its tokens."""

GENERATE: Final = "generate"
"""What a worker announces as its tasks when its model generates."""

MAX_POOLED_PROMPTS: Final = 32
"""Prompts that one call of a worker has at most."""
