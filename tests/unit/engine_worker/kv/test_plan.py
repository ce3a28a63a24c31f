"""Which bytes travel in which message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv.plan import Packing, check_block_ids, joint_runs, plan_messages
from mesh.errors import KvTransferRefused

BLOCKS = 64


@st.composite
def pairings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    count = draw(st.integers(1, BLOCKS))
    source = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count))
    target = draw(st.permutations(range(BLOCKS)))[:count]
    if draw(st.booleans()):
        source = list(range(source[0] % (BLOCKS - count + 1), source[0] % (BLOCKS - count + 1) + count))
    if draw(st.booleans()):
        target = sorted(target)
    return source, target


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    direct = draw(st.integers(1, 400))
    gathered = draw(st.integers(direct, 800))
    return Packing(draw(st.integers(max(gathered, 100), 2000)), gathered, direct)


@pytest.mark.slow
@given(pairings())
def test_runs_are_the_two_lists_again(lists: tuple[list[int], list[int]]) -> None:
    source, target = lists
    runs = joint_runs(source, target)
    pairs = [(run.source_block + i, run.target_block + i) for run in runs for i in range(run.blocks)]
    assert pairs == list(zip(source, target, strict=True))


def test_consecutive_blocks_are_one_run() -> None:
    assert len(joint_runs(range(5, 25), range(30, 50))) == 1
    assert len(joint_runs([1, 2, 3], [7, 8, 10])) == 2


def run_by_run(run_blocks: list[int], region_block_bytes: list[int], packing: Packing) -> list[list[tuple[int, int]]]:
    """The plan, made one run after another, as region and index of each block. Earlier releases plan just so, and while
    a mesh is upgraded they exchange blocks with later ones: within one `PROTOCOL_VERSION` the order never changes."""
    messages: list[list[tuple[int, int]]] = []
    packed: list[tuple[int, int]] = []
    packed_bytes = 0
    for region, block_bytes in enumerate(region_block_bytes):
        first = 0
        for count in run_blocks:
            blocks = [(region, index) for index in range(first, first + count)]
            first += count
            if count * block_bytes >= packing.direct_bytes:
                step = packing.message_bytes // block_bytes
                messages += [blocks[begin : begin + step] for begin in range(0, count, step)]
                continue
            if packed_bytes + count * block_bytes > packing.gathered_bytes:
                messages.append(packed)
                packed, packed_bytes = [], 0
            packed, packed_bytes = packed + blocks, packed_bytes + count * block_bytes
    return [*messages, packed] if packed else messages


@given(pairings(), st.lists(st.integers(1, 100), min_size=1, max_size=4), packings())
def test_both_sides_send_and_await_the_same_blocks_in_the_same_order(
    lists: tuple[list[int], list[int]], region_block_bytes: list[int], packing: Packing
) -> None:
    runs = joint_runs(*lists)
    expected = run_by_run([run.blocks for run in runs], region_block_bytes, packing)
    for ids, starts in zip(lists, ([r.source_block for r in runs], [r.target_block for r in runs]), strict=True):
        side = [(start, run.blocks) for start, run in zip(starts, runs, strict=True)]
        messages = list(plan_messages(side, region_block_bytes, packing))
        assert [[(each.region, block) for each in message.blocks for block in each.ids] for message in messages] == [
            [(region, ids[index]) for region, index in blocks] for blocks in expected
        ]
        for message in messages:
            assert message.nbytes == sum(len(each.ids) * region_block_bytes[each.region] for each in message.blocks)
            assert 0 < message.nbytes <= packing.message_bytes


@given(pairings(), st.lists(st.integers(1, 100), min_size=1, max_size=4), packings())
def test_every_byte_travels_once(
    lists: tuple[list[int], list[int]], region_block_bytes: list[int], packing: Packing
) -> None:
    runs = [(run.target_block, run.blocks) for run in joint_runs(*lists)]
    moved = [
        (each.region, block)
        for message in plan_messages(runs, region_block_bytes, packing)
        for each in message.blocks
        for block in each.ids
    ]
    assert len(moved) == len(set(moved))
    assert set(moved) == {(region, block) for region in range(len(region_block_bytes)) for block in lists[1]}


def test_a_long_run_travels_in_place_and_short_ones_together() -> None:
    packing = Packing(message_bytes=1000, gathered_bytes=500, direct_bytes=300)
    messages = list(plan_messages([(0, 25), (40, 1), (50, 1)], [100], packing))
    assert [message.nbytes for message in messages] == [1000, 1000, 500, 200]
    assert [message.blocks[0].ids.tolist() for message in messages] == [
        [*range(10)],
        [*range(10, 20)],
        [*range(20, 25)],
        [40, 50],
    ]


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ([], [], "at least one"),
        ([1], [1, 2], "do not pair up"),
        ([1, 2], [3, 3], "twice"),
        ([1], [64], "below 64"),
        ([-1], [0], "from 0 on"),
    ],
)
def test_lists_that_make_no_sense_are_refused(source: list[int], target: list[int], reason: str) -> None:
    with pytest.raises(KvTransferRefused, match=reason):
        check_block_ids(source, target, BLOCKS)
