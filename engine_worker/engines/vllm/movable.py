"""What an own engine core and an attached server have in common of `MovableEngine` and `PrefixEngine`."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.engines.vllm.connector_moves import ConnectorMoves
from engine_worker.engines.vllm.prefixes import VllmPrefixes
from engine_worker.engines.vllm.running import EngineRequestState
from engine_worker.kv.service import AgentPort
from mesh.errors import ConfigurationError, KvTransferRefused, RequestRefused

log = logging.getLogger(__name__)

MovesT = TypeVar("MovesT", bound=ConnectorMoves)
RequestT = TypeVar("RequestT", bound=EngineRequestState)
StartedT = TypeVar("StartedT")


class MovableByConnector(ABC, Generic[MovesT, RequestT]):
    """Keeps the requests, and orders their moves of our connector."""

    def __init__(self, immovable: str, *, is_to_move: bool) -> None:
        """`immovable`: why requests cannot move, until `_moves` is there. `is_to_move`: whether that is bad news."""
        self._requests: dict[str, RequestT] = {}
        self._moves: MovesT | None = None
        """None where requests cannot move."""
        self._immovable = immovable
        self._is_to_move = is_to_move

    @property
    def kv_address(self) -> str:
        """See `MovableEngine.kv_address`; empty where requests cannot move."""
        return "" if self._moves is None else self._moves.kv_address

    def kv_agent(self) -> AgentPort:
        """See `MovableEngine.kv_agent`."""
        if self._moves is not None:
            return self._moves.agent
        if self._is_to_move:
            raise KvTransferRefused(self._immovable)
        raise ConfigurationError(f"there is no KV transfer agent, since requests cannot move: {self._immovable}")

    @property
    def kv_block_bytes(self) -> int:
        """See `MovableEngine`; 0 where requests cannot move."""
        return 0 if self._moves is None else self._moves.kv_block_bytes

    @property
    def prefixes(self) -> VllmPrefixes:
        """See `PrefixEngine`."""
        return self._movable.prefixes

    def export(
        self, request_id: str, migration_id: str, kv_token: str, on_progress: Callable[[ExportProgress], None]
    ) -> None:
        moves, running = self._movable, self._requests.get(request_id)
        if running is None:
            raise RequestRefused(f"no request {request_id!r} runs here; it may have ended")
        moves.exports.export(running, migration_id, kv_token, on_progress)

    async def pause(self, request_id: str) -> PausedRequest | None:
        """See `MovableEngine.pause`. At an attached server also None for a request that ended with tokens which nobody
        has heard: it goes on behind the last one that was."""
        running = self._requests.get(request_id)
        return None if running is None else await self._movable.exports.pause(running)

    def resume(self, request_id: str) -> None:
        """See `MovableEngine.resume`. The request is submitted again; the prefix cache has its full blocks."""
        running = self._requests.get(request_id)
        if running is not None:
            self._movable.exports.resume(running)

    def withdraw(self, request_id: str, migration_id: str) -> None:
        self._movable.exports.withdraw(migration_id)

    def release(self, request_id: str, migration_id: str) -> None:
        running = self._requests.get(request_id)
        if running is None or not running.is_paused:
            return
        del self._requests[request_id]
        self._left(request_id)
        self._movable.exports.release(running)

    async def pull(
        self,
        migration_id: str,
        peer: str,
        first_block: int,
        peer_block_ids: tuple[int, ...],
        emitted_token_ids: tuple[int, ...],
        deadline_s: float,
    ) -> None:
        imports = self._movable.imports
        await imports.pull(migration_id, peer, first_block, peer_block_ids, emitted_token_ids, deadline_s)

    def discard(self, migration_id: str) -> None:
        self._movable.imports.discard(migration_id)

    @abstractmethod
    def _left(self, request_id: str) -> None:
        """The request is another instance's from now on."""

    @property
    def _movable(self) -> MovesT:
        if self._moves is None:
            raise RequestRefused(f"requests cannot move to or from here: {self._immovable}")
        return self._moves

    async def _unless_immovable(self, moves: MovesT, starting: Awaitable[StartedT]) -> StartedT | None:
        """What starting `moves` returns; None where it finds that its blocks cannot move."""
        try:
            return await starting
        except ConfigurationError as error:
            log.warning("requests cannot move to or from this engine", extra={"reason": str(error)})
            self._moves, self._immovable = None, str(error)
            await moves.close()
            return None
