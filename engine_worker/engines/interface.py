"""What the mesh asks of an engine. Two kinds stand behind it: `vllm` and `simulated`."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, StepOutput


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine turned out to hold once it was started."""

    block_tokens: int
    kv_blocks: int
    max_model_len_tokens: int
    max_batch_requests: int
    max_step_tokens: int
    tensor_parallel: int = 1
    """GPUs (or processes on a CPU) that share each layer."""
    pipeline_parallel: int = 1
    """Groups of these that each hold a part of the layers."""


class Engine(Protocol):
    """Continuous batching over one model, one output message per step.

    Everything runs on the caller's event loop. `outputs` and `kv_blocks` each have one consumer.
    """

    async def start(self) -> EngineLimits:
        """Load the model; returns once requests can be submitted. Raises `EngineFailed` if it cannot be."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestRefused` for one that this engine can never serve (too long,
        unknown token, a running request of the same id, full queue)."""

    def abort(self, request_id: str) -> None:
        """Take a request back before its next step; unknown ids are ignored, because an abort may cross the
        request's own end. The request ends with one delta whose finish reason is ABORT."""

    def outputs(self) -> AsyncIterator[StepOutput]:
        """One message per engine step that brought tokens or ended requests. Ends when the engine is stopped
        and raises `EngineFailed` when it died."""

    def load(self) -> LoadReport:
        """The load as of the last step; cheap."""

    def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        """Changes of the prefix cache since the engine started, in order and without gaps; a gap in the
        engine's own event stream appears as `cleared=True` followed by what is known to be there."""

    async def stop(self) -> None:
        """End all requests with ABORT and free everything, child processes included."""
