"""What pooling models do."""

from typing import Final, Literal

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""vLLM's names: a vector, or the scores of classes; of the whole prompt, or of each of its tokens."""

GENERATE: Final = "generate"
"""What a worker announces as its tasks when its model generates."""

SEPARATED: Final = "separated"
JOINED: Final = "joined"
"""What a worker announces of how its model takes a pair of texts: with a separator and, where it has them, segment ids;
or one behind the other. A worker that announces neither takes no segment ids."""

MAX_POOLED_PROMPTS: Final = 32
"""Prompts that one call of a worker has at most."""
