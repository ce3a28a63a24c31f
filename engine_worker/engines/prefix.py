"""The interface of an engine whose cached prefixes peers may pull, and which pulls theirs. The protocol is not here."""

from typing import Protocol, TypeGuard

from controlplane.model.request import EngineRequest
from engine_worker.engines.interface import Engine
from engine_worker.engines.movable import MovableEngine


class PrefixTransfers(Protocol):
    """Full blocks of prompts, by the engine's own hashes: the cache salt, the LoRA adapter and the media of a request
    belong to them, its sampling does not. The ids of holds and pulls are the worker's, and no requests'."""

    # The source's side.

    async def hold(
        self, hold_id: str, request: EngineRequest, most_blocks: int, wait_s: float, kv_token: str
    ) -> tuple[int, ...]:
        """Keep the leading blocks of the request's prompt that are cached from being evicted, and let whoever has the
        token pull them under `hold_id`. Returns the engine's ids of them; fewer than `most_blocks` where not all are
        there, or where the engine needs the room. What the memory of its host has of them is loaded first. Blocks that
        are about to be computed are waited for, for `wait_s` at most.

        Nothing is computed for it, and no step waits for it. `let_go` must follow, if this raised or was cancelled too.
        """

    def let_go(self, hold_id: str) -> None:
        """Peers may no longer pull the blocks, which may be evicted again. Unknown ids are ignored."""

    # The target's side.

    async def fetch(
        self, pull_id: str, request: EngineRequest, peer: str, peer_block_ids: tuple[int, ...], deadline_s: float
    ) -> int:
        """Copy the leading blocks of the request's prompt from the peer's agent (`peer` as in `MovableEngine.pull`),
        which holds them under `pull_id`, into the prefix cache; those that are there already are not copied. Returns
        how many were.

        However it ends, cancelled too, nothing is reserved or written to afterwards. Raises `RequestRefused` (no room),
        `RpcError` or `EngineError`.
        """


class PrefixEngine(MovableEngine, Protocol):
    """An engine that has prefix transfers."""

    @property
    def prefixes(self) -> PrefixTransfers:
        """Call after `start`. Raises `RequestRefused` or `ConfigurationError` where its settings forbid them."""


def has_prefixes(engine: Engine) -> TypeGuard[PrefixEngine]:
    """Whether the class of this engine can transfer prefixes at all; its settings may still forbid it."""
    return hasattr(type(engine), "prefixes")
