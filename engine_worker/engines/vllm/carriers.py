"""Carriers: requests of vLLM's without an answer of their own, which bring blocks of a peer into its prefix cache.

A carrier's prompt is exactly the tokens of the blocks. It pulls what the prefix cache lacks and leaves it there, under
vLLM's own hashes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from controlplane.model.request import EngineRequest, engine_priority
from engine_worker.adapters import NumberedAdapter
from engine_worker.engines.vllm.connector.channel import CoreChannel
from engine_worker.engines.vllm.connector.messages import LoadOutcome
from mesh.errors import EngineFailed

WITHOUT_ANSWER: Final = {
    "max_tokens": 1,
    "temperature": 0.0,
    "ignore_eos": True,
    "detokenize": False,
    "skip_clone": True,
}
"""Sampling arguments of requests whose answer nobody reads."""


class UnreadRequests(Protocol):
    """What moving takes of a vLLM, whichever process it is in, besides the control channel to its connector."""

    async def run_unread(
        self,
        request_id: str,
        like: EngineRequest,
        token_ids: Sequence[int],
        transfer_params: Mapping[str, Any],
        priority: int,
        adapter: NumberedAdapter | None = None,
    ) -> str | None:
        """Run a request whose answer nobody reads, of these tokens and otherwise like another one; `transfer_params`
        are for the connector. Cancelled, it is aborted. Returns vLLM's finish reason. Raises `RequestRefused` and
        `EngineFailed`."""

    async def take_out(self, request_id: str, internal_id: str) -> None:
        """Abort a request that the connector has been told to hold then. `internal_id` is vLLM's own id of it."""


async def carry(
    core: UnreadRequests,
    channel: CoreChannel,
    load_id: str,
    export_id: str,
    request: EngineRequest,
    tokens: tuple[int, ...],
    peer: str,
    peer_block_ids: tuple[int, ...],
    adapter: NumberedAdapter | None,
    deadline_s: float,
) -> int:
    """Bring the blocks of these tokens, the first ones of the request's, which the peer has exported as `export_id`.
    `load_id` is the carrier's own. Returns how many had to be pulled. Raises what the pull raised, and `EngineFailed`.
    """
    transfer_params = {
        "load_id": load_id,
        "migration_id": export_id,
        "peer": peer,
        "peer_block_ids": list(peer_block_ids),
        "deadline_s": deadline_s,
    }
    # Its turn comes before that of requests which have not begun anywhere.
    reason = await core.run_unread(
        load_id, request, tokens, transfer_params, engine_priority(request.priority - 1), adapter
    )
    pulled = int(await channel.call(LoadOutcome(load_id)))
    if reason not in ("length", "stop"):
        raise EngineFailed(f"vLLM ended carrier {load_id}: {reason}")
    return pulled


def kv_parameters(transfer_params: Mapping[str, Any], others: dict[str, Any] | None = None) -> dict[str, Any]:
    """The sampling argument that brings this to the connector, and `others` to whom they are for."""
    return {"extra_args": {**(others or {}), "kv_transfer_params": {"penstock": dict(transfer_params)}}}
