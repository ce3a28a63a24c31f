"""Engines of pooling models: vectors and scores of prompts instead of answers to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, get_args

import numpy as np
from numpy.typing import NDArray

from controlplane.model.pooling import JOINED, SEPARATED, PoolingTask
from engine_worker.engines.interface import Engine


@dataclass(frozen=True, slots=True)
class PoolingParameters:
    """As vLLM has them."""

    task: PoolingTask
    dimensions: int | None = None
    """Cut vectors to so many dimensions, where the model was trained for it; None: all."""
    use_activation: bool | None = None
    """Normalise vectors, or squash scores; None: as the model has it."""
    cache_salt: str = ""
    """Only prompts of the same salt find each other's KV in the prefix cache."""
    first_segment_tokens: int | None = None
    """So many tokens are of the first text of a pair, for models that are told by segment ids (BERT's); None: there is
    one text, or the model needs none."""


class PoolingEngine(Engine, Protocol):
    """An engine whose model may be a pooling model. It takes no requests by `submit` then."""

    @property
    def pooling_tasks(self) -> tuple[PoolingTask, ...]:
        """What its model can do, once started, first what it is for; empty for a model that generates."""

    @property
    def has_separator(self) -> bool:
        """Whether a cross-encoder takes two texts in its tokenizer's form for pairs (vLLM's `use_sep_token`); rerankers
        that a language model was made into take one behind the other."""

    async def pool(
        self, request_id: str, token_ids: Sequence[int], parameters: PoolingParameters, priority: int
    ) -> NDArray[np.float32]:
        """One vector of a prompt, or with a token task one for each token. Raises RequestRefused for what the model
        cannot do, `QueueFull`, and EngineFailed. Cancelling it takes the prompt back."""


def is_pooling(engine: Engine) -> TypeGuard[PoolingEngine]:
    """Whether this engine, started, serves a pooling model."""
    return bool(getattr(engine, "pooling_tasks", ()))


def pair_form(engine: Engine) -> str:
    """How a worker announces that its model takes two texts."""
    return "" if not is_pooling(engine) else SEPARATED if engine.has_separator else JOINED


def known_tasks(names: Sequence[Any], first: Any = None) -> tuple[PoolingTask, ...]:
    """Those of `names` that the mesh has a use for, in its own order behind `first`."""
    known = [task for task in get_args(PoolingTask) if task in names]
    return tuple(sorted(known, key=lambda task: task != first))
