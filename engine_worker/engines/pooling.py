"""Engines of pooling models: vectors and scores of prompts instead of answers to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, get_args

import numpy as np
from numpy.typing import NDArray

from controlplane.model.pooling import PoolingTask
from engine_worker.engines.interface import Engine


@dataclass(frozen=True, slots=True)
class PoolingParameters:
    """As vLLM has them."""

    task: PoolingTask
    dimensions: int | None = None
    """Cut vectors to so many dimensions, where the model was trained for it; None: all."""
    use_activation: bool | None = None
    """Normalise vectors, or squash scores; None: as the model has it."""


class PoolingEngine(Engine, Protocol):
    """An engine whose model may be a pooling model. It takes no requests by `submit` then."""

    @property
    def pooling_tasks(self) -> tuple[PoolingTask, ...]:
        """What its model can do, once started; empty for a model that generates."""

    async def pool(
        self, request_id: str, token_ids: Sequence[int], parameters: PoolingParameters, priority: int
    ) -> NDArray[np.float32]:
        """One vector of a prompt, or with a token task one for each token. Raises RequestRefused for what the model
        cannot do, `QueueFull`, and EngineFailed. Cancelling it takes the prompt back."""


def is_pooling(engine: Engine) -> TypeGuard[PoolingEngine]:
    """Whether this engine, started, serves a pooling model."""
    return bool(getattr(engine, "pooling_tasks", ()))


def known_tasks(names: Sequence[Any]) -> tuple[PoolingTask, ...]:
    """Those of `names` that the mesh has a use for, in its own order."""
    return tuple(task for task in get_args(PoolingTask) if task in names)
