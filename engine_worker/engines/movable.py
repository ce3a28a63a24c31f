"""The interface of an engine whose requests can migrate. The coordinator drives it; the protocol is not here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from controlplane.model.request import EngineRequest
from engine_worker.engines.interface import Engine
from engine_worker.kv.service import AgentPort


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """A running request's KV, as of the last step."""

    block_ids: tuple[int, ...]
    """The engine's ids of the full blocks, in the order of the tokens; full blocks never change."""
    emitted_tokens: int


@dataclass(frozen=True, slots=True)
class PausedRequest:
    """A request that stands still; every token here has appeared in `outputs` before."""

    emitted_token_ids: tuple[int, ...]
    computed_tokens: int
    """Tokens whose KV is in the blocks."""
    block_ids: tuple[int, ...]
    """All its blocks; the last one is usually partly filled."""


class MovableEngine(Engine, Protocol):
    """Runs on the worker's event loop. Blocks of an exported request may be read by peers until it is withdrawn."""

    @property
    def kv_address(self) -> str:
        """host:port of the KV transfer agent that serves this engine's blocks; host:port,port... of several ranks."""

    def kv_agent(self) -> AgentPort:
        """That agent, to be asked. Raises `ConfigurationError` where there is to be none, and `KvTransferRefused` with
        the reason where there should be one, and this engine's requests cannot move all the same."""

    @property
    def kv_block_bytes(self) -> int:
        """Size of one KV block in bytes."""

    # The source's side.

    def export(
        self, request_id: str, migration_id: str, kv_token: str, on_progress: Callable[[ExportProgress], None]
    ) -> None:
        """Let whoever has the token pull the request's full blocks under `migration_id`, and call `on_progress` now
        and whenever there are more of them. Raises `RequestRefused` for an unknown request."""

    async def pause(self, request_id: str) -> PausedRequest | None:
        """Take the request out of the batch after the current step, keeping its blocks readable. None if it ended
        by itself first (its last delta is then in `outputs`). A paused request brings no deltas."""

    def resume(self, request_id: str) -> None:
        """Put a paused request back into the batch; also takes back a `pause` that has not happened yet."""

    def withdraw(self, request_id: str, migration_id: str) -> None:
        """Peers may no longer read the blocks; the request goes on. Unknown ids are ignored."""

    def release(self, request_id: str, migration_id: str) -> None:
        """The paused request lives elsewhere, or is given up: free its blocks, without any delta."""

    # The target's side.

    async def reserve(self, migration_id: str, request: EngineRequest) -> None:
        """Make room for the request as it stands. Raises `RequestRefused` when there is none."""

    async def pull(
        self,
        migration_id: str,
        peer: str,
        first_block: int,
        peer_block_ids: tuple[int, ...],
        emitted_token_ids: tuple[int, ...],
        deadline_s: float,
    ) -> None:
        """Copy blocks `first_block`... of the request from the peer's agent; `peer` is what `PeerAddress.parse` reads,
        with the token of the source's export, so it belongs into no log. `emitted_token_ids` are the generated
        tokens that the blocks cover, so that the engine can name them. Raises `RpcError` or `EngineError`; nothing
        is written any more once it has returned or raised."""

    def activate(self, migration_id: str, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        """Run the request from here on, with the KV that was pulled; its deltas appear in `outputs` under the
        request's own id, with offsets that continue `emitted_token_ids`."""

    def discard(self, migration_id: str) -> None:
        """Free what was reserved. Unknown ids are ignored."""


def is_movable(engine: Engine) -> TypeGuard[MovableEngine]:
    """Whether the class of this engine can migrate requests at all; its settings may still forbid it."""
    return hasattr(type(engine), "activate")
