"""Requests that arrive: room checked, blocks pulled. The target's half of `MovableEngine`.

Full blocks come with a carrier (see `carriers`) and stay in the prefix cache. The last few, which may not be full, are
pulled into staging memory and copied when the request itself is admitted: so the pause takes one pull and one step.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from controlplane.model.request import EngineRequest
from engine_worker.adapters import NumberedAdapter
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.vllm.carriers import UnreadRequests, carry
from engine_worker.engines.vllm.connector.channel import CoreChannel
from engine_worker.engines.vllm.connector.messages import FreeBlocks, Stage, Unstage
from engine_worker.engines.vllm.connector.staging import BLOCKS_PER_MIGRATION, STAGING_BLOCKS
from mesh.errors import DeadlineExceeded, ProtocolViolation, RequestRefused


@dataclass(slots=True, eq=False)
class _Import:
    request: EngineRequest
    blocks: int
    """Blocks that the request needed when it was offered."""
    peer_block_ids: list[int] = field(default_factory=list)
    """The peer's ids of its blocks, as far as they are known."""
    carried_blocks: int = 0
    """Leading blocks that carriers brought."""
    staged_blocks: int = 0
    """Blocks behind them that are in staging memory."""
    carriers: int = 0
    adapter: NumberedAdapter | None = None


class Imports:
    """The target's half of `MovableEngine` for vLLM: requests that are about to arrive."""

    def __init__(self, channel: CoreChannel, core: UnreadRequests, limits: EngineLimits) -> None:
        self._channel = channel
        self._core = core
        self._limits = limits
        self._imports: dict[str, _Import] = {}

    async def reserve(
        self, migration_id: str, request: EngineRequest, requests: int, adapter: NumberedAdapter | None = None
    ) -> None:
        """See `MovableEngine.reserve`; `requests` are those in the engine now, `adapter` the request's, loaded."""
        context = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        blocks = context // self._limits.block_tokens + 1
        free = int(await self._channel.call(FreeBlocks()))
        self._imports.pop(migration_id, None)
        expected = sum(other.blocks for other in self._imports.values())
        if blocks + expected > free:
            raise RequestRefused(
                f"the request needs {blocks} KV blocks, and {free} are free, {expected} of them for others that arrive"
            )
        if requests + len(self._imports) >= self._limits.max_batch_requests:
            raise RequestRefused(f"the batch of {self._limits.max_batch_requests} requests is full")
        if (len(self._imports) + 1) * BLOCKS_PER_MIGRATION > STAGING_BLOCKS:
            raise RequestRefused(f"{len(self._imports)} requests arrive at once, as many as there may")
        self._imports[migration_id] = _Import(request, blocks, adapter=adapter)

    async def pull(
        self,
        migration_id: str,
        peer: str,
        first_block: int,
        peer_block_ids: tuple[int, ...],
        emitted_token_ids: tuple[int, ...],
        deadline_s: float,
    ) -> None:
        arriving = self._imports.get(migration_id)
        if arriving is None:
            raise RequestRefused(f"nothing is reserved for migration {migration_id}")
        if first_block > len(arriving.peer_block_ids):
            raise ProtocolViolation(f"blocks from {first_block} on come next, but {len(arriving.peer_block_ids)} do")
        arriving.peer_block_ids[first_block:] = peer_block_ids
        arriving.staged_blocks = max(0, min(arriving.staged_blocks, first_block - arriving.carried_blocks))
        tokens = arriving.request.prompt_token_ids + emitted_token_ids
        try:
            async with asyncio.timeout(deadline_s):
                await self._pull(migration_id, arriving, peer, tokens, deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{len(peer_block_ids)} blocks of migration {migration_id} did not arrive within {deadline_s:g} s"
            ) from error

    def arrived(
        self, migration_id: str, emitted_token_ids: tuple[int, ...], computed_tokens: int
    ) -> tuple[EngineRequest, dict[str, Any]]:
        """The request as it is to be run, and its parameters for the connector. Raises `RequestRefused` for an
        unknown migration."""
        arriving = self._imports.pop(migration_id, None)
        if arriving is None:
            raise RequestRefused(f"nothing is reserved for migration {migration_id}")
        transfer_params = {
            "staged": migration_id,
            "first_block": arriving.carried_blocks,
            "computed_tokens": computed_tokens,
        }
        covered = (arriving.carried_blocks + arriving.staged_blocks) * self._limits.block_tokens
        if covered < computed_tokens:
            transfer_params["computed_tokens"] = covered
        return replace(arriving.request, emitted_token_ids=emitted_token_ids), transfer_params

    def discard(self, migration_id: str) -> None:
        if self._imports.pop(migration_id, None) is not None:
            self._channel.send(Unstage(migration_id))

    async def _pull(
        self, migration_id: str, arriving: _Import, peer: str, tokens: tuple[int, ...], deadline_s: float
    ) -> None:
        total = len(arriving.peer_block_ids)
        full = min(total, len(tokens) // self._limits.block_tokens)
        if total - arriving.carried_blocks > BLOCKS_PER_MIGRATION:
            if total - full > BLOCKS_PER_MIGRATION:
                raise ProtocolViolation(f"{total} blocks hold more than the {len(tokens)} tokens that are named")
            await self._carry(migration_id, arriving, peer, tokens[: full * self._limits.block_tokens], deadline_s)
            arriving.carried_blocks, arriving.staged_blocks = full, 0
        rest = arriving.peer_block_ids[arriving.carried_blocks + arriving.staged_blocks :]
        if rest:
            await self._channel.call(Stage(migration_id, arriving.staged_blocks, peer, tuple(rest), deadline_s))
            arriving.staged_blocks += len(rest)

    async def _carry(
        self, migration_id: str, arriving: _Import, peer: str, tokens: tuple[int, ...], deadline_s: float
    ) -> None:
        arriving.carriers += 1
        await carry(
            self._core,
            self._channel,
            f"{migration_id}/carrier-{arriving.carriers}",
            migration_id,
            arriving.request,
            tokens,
            peer,
            tuple(arriving.peer_block_ids[: len(tokens) // self._limits.block_tokens]),
            arriving.adapter,
            deadline_s,
        )
