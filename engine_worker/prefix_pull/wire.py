"""Prefixes as messages between workers."""

from controlplane.model.request import EngineRequest, SamplingParams
from penstock.v1 import prefix_pull_pb2


def prefix_request(request: EngineRequest, pull_id: str, blocks: int, block_tokens: int) -> EngineRequest:
    """What names a prefix to an engine: its tokens and one more (which an engine computes in any case), and what else
    goes into the hashes of its blocks."""
    return EngineRequest(
        request_id=pull_id,
        prompt_token_ids=request.prompt_token_ids[: blocks * block_tokens + 1],
        sampling=SamplingParams(max_tokens=1),
        priority=request.priority,
        cache_salt=request.cache_salt,
        media=request.media,
        adapter=request.adapter,
    )


def refusal(reason: str) -> prefix_pull_pb2.HoldResponse:
    """Nothing is held (any more)."""
    return prefix_pull_pb2.HoldResponse(refusal=prefix_pull_pb2.HoldRefusal(reason=reason))


def held(kv_address: str, block_ids: tuple[int, ...], kv_token: str) -> prefix_pull_pb2.HoldResponse:
    """These may be pulled from there, by whoever has the token."""
    blocks = prefix_pull_pb2.HeldBlocks(kv_address=kv_address, block_ids=block_ids, kv_token=kv_token)
    return prefix_pull_pb2.HoldResponse(held=blocks)
