"""Which cached blocks are pinned for peers. Runs on vLLM's engine loop.

`KVConnectorBase_V1.bind_kv_cache_manager` gives connectors the block pool to count references in; vLLM's own offloading
connector (`v1/simple_kv_offload`) pins blocks in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PARAMETER = "hold"
"""Key in a holder's parameters, with the id of the hold."""


@dataclass(slots=True, eq=False)
class _Hold:
    request: Any
    """vLLM's, which is never scheduled."""
    most_blocks: int
    blocks: list[Any] = field(default_factory=list)
    """vLLM's; a reference of ours keeps each."""
    is_pinned: bool = False
    is_published: bool = False
    is_urgent: bool = False
    """What is there is pinned, be it as it may."""
    has_ended: bool = False
    """vLLM keeps the request for us only."""


class PrefixHolds:
    """All of one engine core."""

    def __init__(
        self,
        block_tokens: int,
        is_wanted: Callable[[str], bool],
        publish: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        """`is_wanted`: whether a hold has been asked for and not been let go yet. `publish` lets peers read blocks."""
        self._block_tokens = block_tokens
        self._is_wanted = is_wanted
        self._publish = publish
        self._kv_cache_manager: Any = None
        self._holds: dict[str, _Hold] = {}

    def bind(self, kv_cache_manager: Any) -> None:
        """vLLM's KV cache manager. Called once, before the first step."""
        self._kv_cache_manager = kv_cache_manager

    @property
    def is_waiting(self) -> bool:
        """Whether `step` has anything to do."""
        return any(not hold.is_published for hold in self._holds.values())

    def begin(self, request: Any, parameters: dict[str, Any]) -> None:
        """A holder has entered vLLM's queue. What was scheduled before has been launched by now: its blocks are
        computed by the time that anybody reads them."""
        hold_id = parameters[PARAMETER]
        if not self._is_wanted(hold_id):
            return
        hold = self._holds[hold_id] = _Hold(request, parameters["blocks"], is_urgent=not parameters["waits"])
        self._pin(hold)
        if hold.is_pinned:
            self._tell(hold_id, hold)

    def hurry(self, hold_id: str) -> None:
        """Wait no longer for blocks that are being computed."""
        if (hold := self._holds.get(hold_id)) is not None:
            hold.is_urgent = True

    def step(self) -> None:
        """A step was composed. What it is to compute is in vLLM's prefix cache already and not computed yet, so what is
        pinned now is published with the next one."""
        for hold_id, hold in self._holds.items():
            if hold.is_pinned and not hold.is_published:
                self._tell(hold_id, hold)
            elif not hold.is_pinned:
                self._pin(hold)

    def ended(self, hold_id: str) -> bool:
        """The holder was aborted. Whether vLLM is to keep it until it is let go."""
        hold = self._holds.get(hold_id)
        if hold is None:
            return False
        if not hold.is_pinned:
            del self._holds[hold_id]
            return False
        hold.has_ended = True
        return True

    def let_go(self, hold_id: str) -> str:
        """Nobody reads the blocks any more. Returns vLLM's id of the request if it kept it for this."""
        hold = self._holds.pop(hold_id, None)
        if hold is None:
            return ""
        # The last first, so that a prefix outlives what follows it.
        self._kv_cache_manager.block_pool.free_blocks(reversed(hold.blocks))
        return str(hold.request.request_id) if hold.has_ended else ""

    def _pin(self, hold: _Hold) -> None:
        found, tokens, *_ = self._kv_cache_manager.get_computed_blocks(hold.request)
        blocks = list(found.blocks[0])[: min(hold.most_blocks, tokens // self._block_tokens)]
        if len(blocks) < hold.most_blocks and not hold.is_urgent:
            return
        pool = self._kv_cache_manager.block_pool
        # The requests that run here need room, too.
        may_take = pool.get_num_free_blocks() // 2
        for block in blocks:
            may_take -= block.ref_cnt == 0
            if may_take < 0:
                break
            hold.blocks.append(block)
        pool.touch(hold.blocks)
        hold.is_pinned = True

    def _tell(self, hold_id: str, hold: _Hold) -> None:
        hold.is_published = True
        self._publish(hold_id, tuple(block.block_id for block in hold.blocks))
