"""Which bytes travel in which message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv.plan import Packing, check_block_ids, extents, joint_runs, plan_messages
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


@given(pairings(), st.lists(st.integers(1, 100), min_size=1, max_size=4), packings())
def test_every_byte_travels_once_and_to_its_place(
    lists: tuple[list[int], list[int]], region_block_bytes: list[int], packing: Packing
) -> None:
    source, target = lists
    runs = joint_runs(source, target)
    moved: set[tuple[int, int, int]] = set()
    for message in plan_messages([run.blocks for run in runs], region_block_bytes, packing):
        read = extents(message, [run.source_block for run in runs])
        written = extents(message, [run.target_block for run in runs])
        for side in (read, written):
            assert sum(e.blocks * region_block_bytes[e.region] for e in side) == message.nbytes
        assert 0 < message.nbytes <= packing.message_bytes
        from_blocks = [(e.region, e.first_block + i) for e in read for i in range(e.blocks)]
        to_blocks = [(e.region, e.first_block + i) for e in written for i in range(e.blocks)]
        for (region, source_block), (to_region, target_block) in zip(from_blocks, to_blocks, strict=True):
            assert region == to_region
            assert (region, source_block, target_block) not in moved
            moved.add((region, source_block, target_block))
    expected = {(r, s, t) for r in range(len(region_block_bytes)) for s, t in zip(source, target, strict=True)}
    assert moved == expected


def test_a_long_run_travels_in_place_and_short_ones_together() -> None:
    packing = Packing(message_bytes=1000, gathered_bytes=500, direct_bytes=300)
    runs = joint_runs([*range(25), 40, 50], [*range(25), 30, 60])
    messages = list(plan_messages([run.blocks for run in runs], [100], packing))
    assert [message.nbytes for message in messages] == [1000, 1000, 500, 200]
    starts = [run.source_block for run in runs]
    assert [len(extents(message, starts)) for message in messages] == [1, 1, 1, 2]


def test_pieces_that_are_neighbours_on_one_side_are_one_extent_there() -> None:
    runs = joint_runs([9, 3, 6], [10, 11, 12])
    (message,) = plan_messages([run.blocks for run in runs], [8], Packing(4096, 4096, 4096))
    assert len(extents(message, [run.source_block for run in runs])) == 3
    assert len(extents(message, [run.target_block for run in runs])) == 1


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
