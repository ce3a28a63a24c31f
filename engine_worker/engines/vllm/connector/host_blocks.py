"""Which blocks are saved in the host's store and which are loaded from there. Runs on vLLM's engine loop.

Blocks are saved while they are pinned in vLLM's block pool, as its own offloading connector does: the requests that
computed them may end meanwhile. Nothing is promised to vLLM that is not pinned in the store and found whole, because
what could not be loaded would end the request.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.v1.request import RequestStatus

from controlplane.model.media import MediaSpan
from controlplane.model.prefix_hash import block_hashes, root_hash
from engine_worker.engines.vllm.connector.host_copies import (
    Fetched,
    HostCopies,
    HostEvent,
    HostLoad,
    HostSave,
    Loaded,
    Saved,
)

LEAST_BLOCKS: Final = 2
"""Fewer are not worth a load."""
_PINNED_SHARE: Final = 8
"""At most one of so many of the engine's blocks is pinned while it is saved."""
_MOST_UNSAVED: Final = 16_384
"""Blocks of requests that have ended, to be saved with later steps if they have not been evicted by then."""
_MOST_STEPS_WAITED: Final = 100_000
"""Steps of an engine that waits are short; then the request is computed."""


@dataclass(slots=True)
class _Fetch:
    first: int
    """Which block of the request the first slot has."""
    slots: tuple[int, ...] | None = None
    """None: not known yet."""
    is_over: bool = False
    """It was given up or used; the request computes the rest."""
    is_loading: bool = False
    looks: int = 0


@dataclass(slots=True)
class _Saving:
    request: Any
    saved: int = 0
    """Leading blocks that are saved, or were on their way."""
    mesh_hashes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """Blocks of a request that has ended."""

    names: tuple[bytes, ...]
    first: int
    block_ids: tuple[int, ...]
    """From `first` on."""
    mesh_hashes: tuple[int, ...]


class HostBlocks:
    """Of one engine core."""

    def __init__(self, block_tokens: int, copies: Callable[[], HostCopies | None]) -> None:
        """`copies` gives None where there is no host tier: then nothing happens."""
        self._copies = copies
        self.orders: list[HostLoad] = []
        """For the worker side's part in the next step."""
        self._block_tokens = block_tokens
        self._kv_cache_manager: Any = None
        self._requests: dict[str, _Saving] = {}
        """By vLLM's id: those that run or wait here."""
        self._fetches: dict[str, _Fetch] = {}
        self._unsaved: deque[_Unsaved] = deque()
        self._pinned: dict[int, int] = {}
        """Blocks that are being saved: how often."""

    def bind(self, kv_cache_manager: Any) -> None:
        """vLLM's KV cache manager. Called once, before the first step."""
        self._kv_cache_manager = kv_cache_manager

    @property
    def copies(self) -> HostCopies | None:
        """What copies blocks, if there is a host tier."""
        return self._copies()

    @property
    def is_active(self) -> bool:
        """Whether `step` may have anything to do."""
        return bool(self._requests or self.orders or self._unsaved)

    @property
    def pinned_blocks(self) -> int:
        """Blocks of the engine that are pinned because they are being saved."""
        return len(self._pinned)

    def on_new_request(self, request: Any) -> None:
        """A request of a client's has entered vLLM's queue."""
        if self.copies is not None and request.prompt_embeds is None:
            self._requests[request.request_id] = _Saving(request)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local prefix cache's the host has, and whether they take time; None: ask again."""
        copies, internal_id = self.copies, request.request_id
        if copies is None or internal_id not in self._requests or request.skip_reading_prefix_cache:
            return 0, False
        fetch, local = self._fetches.get(internal_id), local_tokens // self._block_tokens
        if fetch is None:
            names = request.block_hashes[local : (request.num_tokens - 1) // self._block_tokens]
            count = copies.leading(names)
            if count < LEAST_BLOCKS:
                return 0, False
            self._fetches[internal_id] = _Fetch(local)
            copies.fetch(internal_id, tuple(names[:count]))
            return None, False
        if fetch.is_over:
            return 0, False
        if fetch.slots is None:
            fetch.looks += 1
            fetch.is_over = fetch.looks > _MOST_STEPS_WAITED
            return (0, False) if fetch.is_over else (None, False)
        end = fetch.first + len(fetch.slots)
        if fetch.first <= local < end:
            return end * self._block_tokens - local_tokens, True
        # Blocks in front of it were evicted, or all of it was computed, meanwhile.
        self._give_up(fetch)
        return 0, False

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """The request has blocks for what was matched."""
        fetch = self._fetches.get(request.request_id)
        if not external_tokens or fetch is None or fetch.is_over or fetch.slots is None:
            return
        end = fetch.first + len(fetch.slots)
        begin = end - external_tokens // self._block_tokens
        skipped = fetch.slots[: begin - fetch.first]
        if self.copies is not None:
            self.copies.unpin(skipped)
        self.orders.append(
            HostLoad(
                request.request_id,
                _mesh_id(request),
                fetch.slots[begin - fetch.first :],
                tuple(block_ids[begin:end]),
                is_again=request.num_preemptions > 0,
            )
        )
        fetch.is_over = fetch.is_loading = True

    def step(self, output: Any) -> None:
        """A step was composed: save what earlier ones have computed."""
        if self.copies is None:
            return
        while self._unsaved and self._room > 0:
            self._save_ended(self.copies, self._unsaved.popleft())
        fresh = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for internal_id in output.preempted_req_ids or ():
            self._fetches.pop(internal_id, None)  # it may load again what it has lost
        for internal_id in output.num_scheduled_tokens:
            saving = self._requests.get(internal_id)
            if saving is not None and internal_id not in fresh and saving.request.status == RequestStatus.RUNNING:
                self._save(saving)

    def finished(self, request: Any) -> None:
        """The request ended or was aborted; it has its blocks still."""
        saving = self._requests.pop(request.request_id, None)
        fetch = self._fetches.get(request.request_id)
        if fetch is not None and not fetch.is_loading:
            self._give_up(fetch)
            if fetch.slots is not None:
                del self._fetches[request.request_id]
        if saving is not None and (fetch is None or not fetch.is_loading):
            self._save(saving)
            self._note_unsaved(saving)

    def take(self, event: HostEvent) -> None:
        """From the bridge's loop."""
        match event:
            case Saved(block_ids):
                self._unpin(block_ids)
            case Fetched(internal_id, slots):
                fetch = self._fetches.get(internal_id)
                if fetch is None or fetch.is_over:
                    if self.copies is not None:
                        self.copies.unpin(slots)
                    if internal_id not in self._requests:
                        self._fetches.pop(internal_id, None)
                else:
                    fetch.slots = slots
                    fetch.is_over = not slots
            case Loaded(internal_id):
                if (fetch := self._fetches.get(internal_id)) is not None:
                    fetch.is_loading = False
                    if internal_id not in self._requests:
                        del self._fetches[internal_id]

    def _give_up(self, fetch: _Fetch) -> None:
        if not fetch.is_over and fetch.slots and self.copies is not None:
            self.copies.unpin(fetch.slots)
        fetch.is_over = True

    def _save(self, saving: _Saving) -> None:
        copies, request = self.copies, saving.request
        full = self._full_blocks(request)
        if copies is None or full <= saving.saved:
            return
        lacking = [index for index in range(saving.saved, full) if copies.lacks(request.block_hashes[index])]
        if not lacking:
            saving.saved = full
            return
        ids = self._kv_cache_manager.get_block_ids(request.request_id)[0]
        pool = self._kv_cache_manager.block_pool
        first = lacking[0]
        end = min(full, first + max(0, self._room))
        saving.saved = first
        if end <= first:
            return  # with a later step
        blocks = [pool.blocks[block_id] for block_id in ids[first:end]]
        if any(block.is_null for block in blocks):
            return
        saving.saved = end
        hashes = self._mesh_hashes(saving, end)
        self._pin(blocks)
        block_ids = tuple(block.block_id for block in blocks)
        copies.save(HostSave(tuple(request.block_hashes[:end]), first, block_ids, tuple(hashes[first:end])))

    def _note_unsaved(self, saving: _Saving) -> None:
        """The request ends: what was not saved yet stays in the prefix cache until it is evicted."""
        request, first, full = saving.request, saving.saved, self._full_blocks(saving.request)
        if full <= first or sum(len(each.block_ids) for each in self._unsaved) + full - first > _MOST_UNSAVED:
            return
        block_ids = self._kv_cache_manager.get_block_ids(request.request_id)[0][first:full]
        hashes = self._mesh_hashes(saving, full)[first:full]
        self._unsaved.append(_Unsaved(tuple(request.block_hashes[:full]), first, tuple(block_ids), tuple(hashes)))

    def _save_ended(self, copies: HostCopies, unsaved: _Unsaved) -> None:
        pool, room, blocks = self._kv_cache_manager.block_pool, self._room, list[Any]()
        for name, block_id in zip(unsaved.names[unsaved.first :], unsaved.block_ids, strict=True):
            block = pool.blocks[block_id]
            # vLLM's key of a cached block is its hash, and the group's number behind it. A block that a request holds
            # may have been evicted meanwhile and be under computation again; whoever holds it saves it.
            is_there = block.block_hash is not None and block.block_hash.startswith(name) and not block.ref_cnt
            if len(blocks) == room or not is_there:
                break
            blocks.append(block)
        count = len(blocks)
        if not count:
            return
        end = unsaved.first + count
        self._pin(blocks)
        copies.save(
            HostSave(unsaved.names[:end], unsaved.first, unsaved.block_ids[:count], unsaved.mesh_hashes[:count])
        )
        if count == room and count < len(unsaved.block_ids):
            rest = _Unsaved(unsaved.names, end, unsaved.block_ids[count:], unsaved.mesh_hashes[count:])
            self._unsaved.appendleft(rest)

    @property
    def _room(self) -> int:
        """How many more blocks may be pinned."""
        return len(self._kv_cache_manager.block_pool.blocks) // _PINNED_SHARE - len(self._pinned)

    def _full_blocks(self, request: Any) -> int:
        """Blocks whose content steps that are over have computed."""
        computed = int(request.num_computed_tokens - request.num_in_flight_tokens)
        return min(max(0, computed) // self._block_tokens, len(request.block_hashes))

    def _pin(self, blocks: list[Any]) -> None:
        self._kv_cache_manager.block_pool.touch(blocks)
        for block in blocks:
            self._pinned[block.block_id] = self._pinned.get(block.block_id, 0) + 1

    def _mesh_hashes(self, saving: _Saving, blocks: int) -> list[int]:
        request, hashes = saving.request, saving.mesh_hashes
        if len(hashes) < blocks:
            first = len(hashes) * self._block_tokens
            lora = request.lora_request
            root = root_hash(request.cache_salt or "", "" if lora is None else lora.lora_name)
            spans = [
                MediaSpan(each.identifier, each.mm_position.offset, each.mm_position.length)
                for each in request.mm_features
            ]
            tokens = list(request.all_token_ids[first : blocks * self._block_tokens])
            hashes += block_hashes(tokens, self._block_tokens, hashes[-1] if hashes else root, spans, first)
        return hashes

    def _unpin(self, block_ids: tuple[int, ...]) -> None:
        pool = self._kv_cache_manager.block_pool
        for block_id in block_ids:
            self._pinned[block_id] -= 1
            if not self._pinned[block_id]:
                del self._pinned[block_id]
        # The last first, so that a prefix outlives what follows it.
        pool.free_blocks([pool.blocks[block_id] for block_id in reversed(block_ids)])


def _mesh_id(request: Any) -> str:
    parameters = (request.kv_transfer_params or {}).get("penstock", {})
    return str(parameters.get("request_id", ""))
