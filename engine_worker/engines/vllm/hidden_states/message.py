"""What the engine core sends to the worker's process. MessagePack over a ZeroMQ socket of the machine."""

import msgspec

EXTENSION_CLASS = "engine_worker.engines.vllm.hidden_states.extension.HiddenStateExtension"
"""What vLLM is told as `worker_extension_cls`."""
INTERNAL_SUFFIX = "-"
"""vLLM's own id of a request is the mesh's, this and eight random characters."""


class CapturedStates(msgspec.Struct, frozen=True, array_like=True):
    """Hidden states of one step, as they travel from the engine core to the worker."""

    step: int
    internal_ids: list[str]
    context_tokens: list[int]
    hidden_size: int
    states: bytes


def request_id_of(internal_id: str) -> str:
    """The mesh's id of a request, by vLLM's."""
    return internal_id.rpartition(INTERNAL_SUFFIX)[0]
