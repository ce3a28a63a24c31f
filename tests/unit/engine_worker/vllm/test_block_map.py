"""The map from vLLM's block hashes to the mesh's, against a model of vLLM's block pool."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.instance import KvBlocks
from controlplane.model.media import MediaSpan
from controlplane.model.prefix_hash import block_hashes, root_hash
from engine_worker.engines.vllm.block_map import (
    AllBlocksCleared,
    BlockMap,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
)

BLOCK = 4


def stored(tokens: list[int], first_block: int = 0, **others: object) -> BlockStored:
    """The event of storing a prompt's blocks from `first_block` on; a block's engine hash is made of its prefix."""
    blocks = len(tokens) // BLOCK
    return msgspec.structs.replace(
        BlockStored(
            block_hashes=[engine_hash(tokens[: BLOCK * (block + 1)]) for block in range(first_block, blocks)],
            parent_block_hash=engine_hash(tokens[: BLOCK * first_block]) if first_block else None,
            token_ids=tokens[BLOCK * first_block : BLOCK * blocks],
            block_size=BLOCK,
            medium="GPU",
            group_idx=0,
        ),
        **others,
    )


def removed(prefix: list[int]) -> BlockRemoved:
    return BlockRemoved(block_hashes=[engine_hash(prefix)], medium="GPU", group_idx=0)


def engine_hash(prefix: list[int]) -> int:
    return hash(("engine", *prefix)) & ((1 << 64) - 1)


def test_blocks_get_the_prompt_s_own_hashes() -> None:
    tokens = list(range(3 * BLOCK + 1))
    change = BlockMap(BLOCK).apply([stored(tokens)])
    assert change == KvBlocks(stored=tuple(block_hashes(tokens, BLOCK)))


def test_later_blocks_go_on_from_their_parent() -> None:
    tokens = list(range(3 * BLOCK))
    block_map = BlockMap(BLOCK)
    block_map.apply([stored(tokens[: 2 * BLOCK])])
    assert block_map.apply([stored(tokens, first_block=2)]) == KvBlocks(stored=(block_hashes(tokens, BLOCK)[2],))


def test_a_block_is_gone_with_its_last_copy() -> None:
    tokens = list(range(BLOCK))
    block_map = BlockMap(BLOCK)
    (mesh_hash,) = block_hashes(tokens, BLOCK)
    assert block_map.apply([stored(tokens), stored(tokens)]) == KvBlocks(stored=(mesh_hash,))
    assert block_map.apply([removed(tokens)]) is None
    assert block_map.apply([removed(tokens)]) == KvBlocks(removed=(mesh_hash,))
    assert block_map.apply([removed(tokens)]) is None


def test_what_comes_and_goes_in_one_batch_is_not_told() -> None:
    tokens = list(range(BLOCK))
    block_map = BlockMap(BLOCK)
    assert block_map.apply([stored(tokens), removed(tokens)]) is None
    block_map.apply([stored(tokens)])
    assert block_map.apply([removed(tokens), stored(tokens)]) is None


def test_clearing_forgets_everything_before_it() -> None:
    old, new = list(range(BLOCK)), list(range(50, 50 + BLOCK))
    block_map = BlockMap(BLOCK)
    block_map.apply([stored(old)])
    change = block_map.apply([removed(old), AllBlocksCleared(), stored(new)])
    assert change == KvBlocks(stored=tuple(block_hashes(new, BLOCK)), cleared=True)
    assert block_map.cached_tokens((*old, 1)) == 0
    assert block_map.cached_tokens((*new, 1)) == BLOCK


def test_blocks_that_tokens_do_not_name_are_left_out() -> None:
    tokens = list(range(2 * BLOCK))
    strange = [
        stored(tokens, lora_name="adapter"),
        stored(tokens, lora_name="adapter", extra_keys=[["other"], ["other"]]),
        stored(tokens, lora_name="adapter", extra_keys=[["adapter", b"embedding"], ["adapter"]]),
        stored(tokens, extra_keys=[("image", 0), None]),
        stored(tokens, block_size=2 * BLOCK, block_hashes=[1]),
        stored(tokens, first_block=1),
    ]
    for event in strange:
        block_map = BlockMap(BLOCK)
        assert block_map.apply([event]) is None
        assert block_map.unmapped_blocks_total == len(event.block_hashes)
        assert block_map.apply([removed(tokens[:BLOCK]), removed(tokens)]) is None


def test_blocks_of_a_salt_are_found_by_requests_of_that_salt() -> None:
    tokens = list(range(2 * BLOCK))
    block_map = BlockMap(BLOCK)
    change = block_map.apply([stored(tokens, extra_keys=[["pepper"], None])])
    assert change == KvBlocks(stored=tuple(block_hashes(tokens, BLOCK, root_hash("pepper"))))
    longer = (*tokens, 1)
    assert block_map.cached_tokens(longer, "pepper") == 2 * BLOCK
    assert block_map.cached_tokens(longer) == block_map.cached_tokens(longer, "salt") == 0


@pytest.mark.parametrize("salt", ["", "pepper"])
def test_blocks_of_an_adapter_are_found_by_requests_of_that_adapter(salt: str) -> None:
    tokens = list(range(2 * BLOCK))
    block_map = BlockMap(BLOCK)
    keys = [["d1", salt] if salt else ["d1"], ["d1"]]
    change = block_map.apply([stored(tokens, lora_name="d1", extra_keys=keys)])
    assert change == KvBlocks(stored=tuple(block_hashes(tokens, BLOCK, root_hash(salt, "d1"))))
    longer = (*tokens, 1)
    assert block_map.cached_tokens(longer, salt, adapter_digest="d1") == 2 * BLOCK
    assert block_map.cached_tokens(longer, salt, adapter_digest="d2") == block_map.cached_tokens(longer, salt) == 0
    more = list(range(100, 100 + BLOCK))
    change = block_map.apply([stored([*tokens, *more], first_block=2, lora_name="d1", extra_keys=[["d1"]])])
    assert change == KvBlocks(stored=tuple(block_hashes([*tokens, *more], BLOCK, root_hash(salt, "d1"))[2:]))


def test_offloaded_blocks_and_other_cache_groups_are_not_the_prefix_cache() -> None:
    tokens = list(range(BLOCK))
    block_map = BlockMap(BLOCK)
    assert block_map.apply([stored(tokens, medium="CPU"), stored(tokens, group_idx=1)]) is None
    block_map.apply([stored(tokens)])
    assert block_map.apply([BlockRemoved([engine_hash(tokens)], medium="CPU", group_idx=0)]) is None


def test_the_last_token_of_a_prompt_is_never_cached() -> None:
    tokens = tuple(range(2 * BLOCK))
    block_map = BlockMap(BLOCK)
    block_map.apply([stored(list(tokens))])
    assert block_map.cached_tokens(tokens) == BLOCK
    assert block_map.cached_tokens((*tokens, 1)) == 2 * BLOCK
    assert block_map.cached_tokens(tokens[: BLOCK + 1]) == BLOCK
    assert block_map.cached_tokens((9, *tokens)) == 0
    assert block_map.cached_tokens(()) == 0


def test_the_wire_format() -> None:
    batch = [
        123.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "a_field_of_tomorrow": 1,
            },
            {"type": "BlockRemoved", "block_hashes": [b"\x01"], "medium": None},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    events = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KvEventBatch).events
    assert [type(event) for event in events] == [BlockStored, BlockRemoved, AllBlocksCleared]


@dataclass
class Pool:
    """Physical blocks as vLLM keeps them: equal ones side by side, each told of when stored and when evicted."""

    copies: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def step(self, prompt: list[int], choice: int) -> list[KvEvent]:
        """Store a prompt's uncached blocks, or for an empty prompt evict some leaf."""
        if not prompt:
            return self._evict(choice)
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        hit = 0
        # An odd choice stands for two requests that compute the same blocks at once.
        while hit < len(prefixes) and self.copies[prefixes[hit]] and choice % 2 == 0:
            hit += 1
        for prefix in prefixes[hit:]:
            self.copies[prefix] += 1
        return [stored(prompt, first_block=hit)] if hit < len(prefixes) else []

    def _evict(self, choice: int) -> list[KvEvent]:
        held = sorted(prefix for prefix, count in self.copies.items() if count)
        leaves = [one for one in held if not any(other != one and other[: len(one)] == one for other in held)]
        if not leaves:
            return []
        leaf = leaves[choice % len(leaves)]
        self.copies[leaf] -= 1
        return [removed(list(leaf))]

    def mesh_hashes(self) -> set[int]:
        return {block_hashes(prefix, BLOCK)[-1] for prefix, count in self.copies.items() if count}


prompts = st.lists(st.sampled_from([[1] * BLOCK, [2] * BLOCK, [1, 2] * (BLOCK // 2)]), max_size=4).map(
    lambda blocks: [token for block in blocks for token in block]
)


@given(st.lists(st.lists(st.tuples(prompts, st.integers(0, 9)), max_size=5), max_size=30))
def test_the_changes_add_up_to_what_the_pool_holds(batches: list[list[tuple[list[int], int]]]) -> None:
    pool, block_map, held = Pool(), BlockMap(BLOCK), set[int]()
    for batch in batches:
        change = block_map.apply([event for prompt, choice in batch for event in pool.step(prompt, choice)])
        if change is not None:
            assert held.isdisjoint(change.stored)
            assert held.issuperset(change.removed)
            held = (held - set(change.removed)) | set(change.stored)
        assert held == pool.mesh_hashes()
    assert block_map.unmapped_blocks_total == 0


def test_images_are_told_apart_by_their_hashes() -> None:
    tokens = [7] * (4 * BLOCK)
    spans = (MediaSpan("cat", 2, 5), MediaSpan("dog", 9, 3))
    keys = [[["cat", 2]], [["cat", -2]], [["dog", 1]], None]
    block_map = BlockMap(BLOCK)
    hashes = block_hashes(tokens, BLOCK, spans=spans)
    assert len(set(hashes)) == 4
    assert block_map.apply([stored(tokens, extra_keys=keys)]) == KvBlocks(stored=tuple(hashes))
    assert block_map.cached_tokens((*tokens, 7), spans=spans) == 4 * BLOCK
    assert block_map.cached_tokens((*tokens, 7), spans=(MediaSpan("cow", 2, 5), spans[1])) == 0
    assert block_map.cached_tokens((*tokens, 7), spans=(spans[0], MediaSpan("cow", 9, 3))) == 2 * BLOCK
    assert block_map.cached_tokens((*tokens, 7)) == 0


def test_an_image_and_a_salt_in_one_block() -> None:
    tokens, spans = [7] * BLOCK, (MediaSpan("cat", 1, 2),)
    change = BlockMap(BLOCK).apply([stored(tokens, extra_keys=[[["cat", 1], "pepper"]])])
    assert change == KvBlocks(stored=tuple(block_hashes(tokens, BLOCK, root_hash("pepper"), spans)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 30), st.integers(1, 20), st.integers(0, 9))
def test_hashes_of_a_part_are_those_of_the_whole(tokens: list[int], offset: int, length: int, cut: int) -> None:
    spans = (MediaSpan("cat", offset, length),)
    whole = block_hashes(tokens, BLOCK, spans=spans)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else 0
    rest = block_hashes(tokens[cut * BLOCK :], BLOCK, parent, spans, first_token=cut * BLOCK)
    assert whole[:cut] + rest == whole
    plain = block_hashes(tokens, BLOCK)
    first = offset // BLOCK
    assert whole[:first] == plain[:first]
    assert set(whole[first:]).isdisjoint(plain)
