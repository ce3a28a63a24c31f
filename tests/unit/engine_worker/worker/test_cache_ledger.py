"""A monitor that is told everything and then the changes knows what the engine holds, whatever is lost on the way."""

import hypothesis.strategies as st
from hypothesis import given

from controlplane.model.instance import KvBlocks
from engine_worker.cache_ledger import CacheLedger, KvBacklog

BLOCK = st.integers(0, 30)
CHANGE = st.builds(
    KvBlocks, stored=st.lists(BLOCK).map(tuple), removed=st.lists(BLOCK).map(tuple), cleared=st.booleans()
)


class FakeMonitor:
    """Applies updates in any order within one message, since hashes there are disjoint."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def take_in(self, piece: KvBlocks) -> None:
        assert not set(piece.stored) & set(piece.removed)
        if piece.cleared:
            self.blocks.clear()
        self.blocks |= set(piece.stored)
        self.blocks -= set(piece.removed)


@given(
    events=st.lists(CHANGE | st.just("send") | st.just("redial"), max_size=40),
    capacity=st.integers(1, 40),
    max_changes=st.integers(1, 40),
    piece_blocks=st.integers(1, 8),
)
def test_the_monitor_converges(
    events: list[KvBlocks | str], capacity: int, max_changes: int, piece_blocks: int
) -> None:
    ledger, backlog, monitor = CacheLedger(capacity), KvBacklog(max_changes), FakeMonitor()
    for event in [*events, "send"]:
        if isinstance(event, KvBlocks):
            backlog.add(ledger.apply(event))
        elif event == "redial":
            monitor = FakeMonitor()
            monitor.blocks = {99}
            backlog.restart()
        else:
            for piece in backlog.take(ledger.blocks, piece_blocks):
                assert len(piece.stored) + len(piece.removed) <= piece_blocks
                monitor.take_in(piece)
            assert monitor.blocks == ledger.blocks
        assert len(ledger.blocks) <= capacity


def test_changes_while_pieces_are_on_their_way_come_on_top() -> None:
    ledger, backlog, monitor = CacheLedger(10), KvBacklog(10), FakeMonitor()
    ledger.apply(KvBlocks(stored=(1, 2, 3)))
    pieces = backlog.take(ledger.blocks, 1)
    monitor.take_in(next(pieces))
    backlog.add(ledger.apply(KvBlocks(stored=(4,), removed=(1,))))
    for piece in [*pieces, *backlog.take(ledger.blocks)]:
        monitor.take_in(piece)
    assert monitor.blocks == {2, 3, 4}


def test_what_was_told_is_not_told_again() -> None:
    ledger, backlog = CacheLedger(10), KvBacklog(10)
    assert list(backlog.take(ledger.blocks)) == [KvBlocks(cleared=True)]
    backlog.add(ledger.apply(KvBlocks(stored=(1,))))
    assert list(backlog.take(ledger.blocks)) == [KvBlocks(stored=(1,))]
    assert not backlog
    assert list(backlog.take(ledger.blocks)) == []


def test_more_blocks_than_the_engine_has_empty_the_index() -> None:
    ledger = CacheLedger(2)
    assert ledger.apply(KvBlocks(stored=(1, 2))) == KvBlocks(stored=(1, 2))
    assert ledger.apply(KvBlocks(stored=(3,))) == KvBlocks(cleared=True)
    assert ledger.blocks == set()
    assert ledger.overflows_total == 1
