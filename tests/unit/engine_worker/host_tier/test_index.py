"""The index of a host's store: several processes, in any order, each killed before any of its writes."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from engine_worker.host_tier.index import COUNTERS, ENTRY, FREE, NAME_BYTES, READY, WRITING, HostIndex
from tests.examples import examples

SLOTS = 6
CHAINS = 3
CHAIN_BLOCKS = 4


class KilledError(Exception):
    pass


class MortalIndex(HostIndex):
    """Raises, as if its process were killed, instead of the write after so many more."""

    writes_left: int | None = None

    def _put(self, slot: int, field: str, value: Any) -> None:
        self._live_or_die()
        super()._put(slot, field, value)

    def _count(self, counter: int, value: int) -> None:
        self._live_or_die()
        super()._count(counter, value)

    def _live_or_die(self) -> None:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                raise KilledError


class Machine:
    """The shared arrays, and who lives."""

    def __init__(self, slots: int = SLOTS, journal: int = 8) -> None:
        self.counters: NDArray[np.uint64] = np.zeros(COUNTERS, np.uint64)
        self.entries: NDArray[Any] = np.zeros(slots, ENTRY)
        self.journal: NDArray[np.uint32] = np.zeros(journal, np.uint32)
        self.alive: set[int] = set()
        first = self.process(0)
        with first.begin():
            first.grow(slots)

    def process(self, client: int) -> MortalIndex:
        """A process that has just come, under a number that nobody alive has."""
        index = MortalIndex(self.counters, self.entries, self.journal, self.alive.__contains__)
        self.alive.add(client)
        with index.begin():
            index.claim(client)
        return index


def name_of(chain: int, block: int) -> bytes:
    return bytes([chain + 1, block]).ljust(NAME_BYTES, b"\0")


def names_of(chain: int, blocks: int = CHAIN_BLOCKS) -> list[bytes]:
    return [name_of(chain, block) for block in range(blocks)]


def hash_of(name: bytes) -> int:
    return name[0] * 1000 + name[1]


def store(index: HostIndex, names: Sequence[bytes]) -> list[int]:
    with index.begin():
        found = index.reserve(names, 0, len(names))
    with index.begin():
        for which, slot in found:
            assert index.commit(slot, hash_of(names[which]), 7)
    return [which for which, _ in found]


def test_what_one_process_stores_another_one_reads() -> None:
    machine = Machine()
    one, other = machine.process(0), machine.process(1)
    assert store(one, names_of(0)) == [0, 1, 2, 3]
    assert other.leading(names_of(0)) == 0
    with other.begin():
        pass
    assert other.leading(names_of(0)) == 4
    assert other.changes() == (True, [hash_of(name) for name in names_of(0)], [])
    assert other.changes() == (False, [], [])


def test_the_end_of_the_chain_that_was_used_longest_ago_goes_first() -> None:
    index = Machine(slots=6).process(0)
    store(index, names_of(0, 3))
    store(index, names_of(1, 3))
    with index.begin():
        index.unpin(index.pin(names_of(0, 3)))
    store(index, names_of(2, 2))
    assert [index.leading(names_of(chain, 3)) for chain in range(3)] == [3, 1, 2]
    assert index.evictions_total == 2


def test_a_chain_longer_than_the_store_keeps_its_beginning() -> None:
    index = Machine(slots=6).process(0)
    names = names_of(0, 10)
    for end in (4, 8, 10):
        store(index, names[:end])
    assert index.leading(names) == 6


def test_nothing_goes_that_is_read() -> None:
    machine = Machine(slots=4)
    one, other = machine.process(0), machine.process(1)
    store(one, names_of(0, 4))
    with other.begin():
        slots = other.pin(names_of(0, 3))
    assert store(one, names_of(1, 4)) == [0]
    assert one.leading(names_of(0, 4)) == 3
    with other.begin():
        other.unpin(slots)
    assert len(store(one, names_of(2, 4))) == 4


def test_what_dead_processes_read_goes_and_what_they_were_writing_is_written_anew() -> None:
    machine = Machine(slots=4)
    one, other = machine.process(0), machine.process(1)
    store(one, names_of(0, 2))
    with other.begin():
        other.pin(names_of(0, 2))
        other.reserve(names_of(1, 2), 0, 2)
    assert store(one, names_of(1, 2)) == []
    machine.alive.discard(1)
    assert store(one, names_of(1, 2)) == [0, 1]
    assert len(store(one, names_of(2, 4))) == 4


def test_a_commit_of_a_process_that_was_taken_for_dead_counts_for_nothing() -> None:
    machine = Machine(slots=2)
    one, other = machine.process(0), machine.process(1)
    with other.begin():
        ((_, slot),) = other.reserve(names_of(0, 1), 0, 1)
    machine.alive.discard(1)
    assert store(one, names_of(0, 1)) == [0]
    with other.begin():
        assert not other.commit(slot, 1, 1)
    one.validate()


def test_a_corrupt_block_is_not_read_again_and_its_readers_keep_it() -> None:
    machine = Machine(slots=1)
    one, other = machine.process(0), machine.process(1)
    store(one, names_of(0, 1))
    with other.begin():
        other.pin(names_of(0, 1))
    with one.begin():
        (slot,) = one.pin(names_of(0, 1))
        one.discard(slot)
        one.unpin([slot])
    assert one.leading(names_of(0, 1)) == 0
    assert one.corrupt_total == 1
    assert store(one, names_of(1, 1)) == []
    with other.begin():
        other.unpin([slot])
    assert store(one, names_of(1, 1)) == [0]


def test_two_contents_of_one_hash_are_told_of_once() -> None:
    index = Machine().process(0)
    index.changes()
    for name in names_of(0, 2):
        with index.begin():
            ((_, slot),) = index.reserve([name], 0, 1)
            index.commit(slot, 5, 0)
    assert index.changes() == (False, [5], [])
    with index.begin():
        index.discard(0)
    assert index.changes() == (False, [], [])
    with index.begin():
        index.discard(1)
    assert index.changes() == (False, [], [5])


@pytest.mark.parametrize("field", ["name", "checksum", "mesh_hash", "guard"])
def test_an_entry_that_does_not_vouch_for_itself_is_mended_away(field: str) -> None:
    machine = Machine()
    index = machine.process(0)
    store(index, names_of(0, 2))
    machine.entries[field][1] = np.void(b"x" * NAME_BYTES) if field == "name" else 99
    machine.counters[1] = 1  # a process was killed in a change
    with index.begin():
        pass
    assert index.leading(names_of(0, 2)) == 1
    index.validate()


class Process:
    def __init__(self, index: MortalIndex) -> None:
        self.index = index
        self.pinned: list[tuple[int, bytes]] = []
        self.writing: list[tuple[int, bytes]] = []


ACTIONS = ("reserve", "commit", "abandon", "pin", "unpin", "discard", "follow", "reap")


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_whoever_is_killed_wherever_no_wrong_block_is_read(data: st.DataObject) -> None:
    machine = Machine()
    processes: dict[int, Process] = {}
    written: dict[bytes, set[int]] = {}
    """Checksums that were ever committed under a name."""
    for step in range(data.draw(st.integers(1, 25))):
        client = data.draw(st.integers(0, 2))
        if client not in processes:
            processes[client] = Process(machine.process(client))
        process, index = processes[client], processes[client].index
        action = data.draw(st.sampled_from(ACTIONS))
        names = names_of(data.draw(st.integers(0, CHAINS - 1)), data.draw(st.integers(1, CHAIN_BLOCKS)))
        index.writes_left = data.draw(st.none() | st.integers(0, 40))
        try:
            with index.begin():
                act(process, action, names, written, step)
        except KilledError:
            machine.alive.discard(client)
            del processes[client]
        else:
            index.writes_left = None
        check(machine, processes, written)


def act(process: Process, action: str, names: list[bytes], written: dict[bytes, set[int]], step: int) -> None:
    index = process.index
    match action:
        case "reserve":
            process.writing += [(slot, names[which]) for which, slot in index.reserve(names, 0, len(names))]
        case "commit" if process.writing:
            slot, name = process.writing.pop(0)
            written.setdefault(name, set()).add(step)
            assert index.commit(slot, hash_of(name), step)
        case "abandon" if process.writing:
            index.abandon(process.writing.pop()[0])
        case "pin":
            count = index.leading(names)
            process.pinned += zip(index.pin(names), names[:count], strict=True)
        case "unpin" if process.pinned:
            index.unpin([process.pinned.pop(0)[0]])
        case "discard" if process.pinned:
            slot, name = process.pinned.pop()
            index.discard(slot)
            index.unpin([slot])
        case "reap":
            index.reap()


def check(machine: Machine, processes: dict[int, Process], written: dict[bytes, set[int]]) -> None:
    onlooker = HostIndex(machine.counters, machine.entries, machine.journal, machine.alive.__contains__)
    with onlooker.begin():
        pass
    onlooker.validate()
    entries = machine.entries
    for slot in np.flatnonzero(entries["state"] == READY).tolist():
        assert int(entries["checksum"][slot]) in written[bytes(entries["name"][slot])]
    for client, process in processes.items():
        for slot, name in process.writing:
            assert entries["state"][slot] == WRITING
            assert (entries["writer"][slot], bytes(entries["name"][slot])) == (client, name)
        for slot, name in process.pinned:
            # It may have been found corrupt, but nothing else comes into its slot while it is read.
            assert bytes(entries["name"][slot]) == name
            assert entries["state"][slot] in (READY, FREE)
