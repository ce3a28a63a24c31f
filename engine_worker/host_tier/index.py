"""Which block lies where in a host's store, who uses it, and which one goes next. No I/O: arrays in, arrays changed.

The arrays are memory that several processes share. One of them at a time changes anything (`store` has the lock for
that), and any of them may be killed at any moment, in the middle of a change too. So every entry vouches for itself
(`guard`), a change is marked as under way (`DIRTY`) and whoever comes next after a killed process mends what it left;
and all that a process holds (pins, slots that it writes to) bears its number, so that it ends with it.

Each process follows the changes of the others by a journal of slots, from which it keeps dictionaries of its own: a
shared hash table would have to survive the same crashes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from mesh.invariants import invariants

NAME_BYTES: Final = 32
MAX_CLIENTS: Final = 64
"""Processes that write to a store or read blocks of it at a time: a bit each of an entry's pins."""
JOURNAL_SLOTS: Final = 1 << 16
"""Changes that a process may lag behind before it reads all entries anew."""
NOBODY: Final = 255

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2

ENTRY: Final = np.dtype(
    [
        ("guard", "<u8"),
        ("mesh_hash", "<u8"),
        ("checksum", "<u8"),
        ("used", "<u8"),
        ("pins", "<u8"),
        ("state", "u1"),
        ("writer", "u1"),
        ("unused", "V6"),
        ("name", f"V{NAME_BYTES}"),
    ]
)
"""Of one slot. `used` grows with use, `pins` has a bit for each process that reads the block now."""

EPOCH: Final = 0
"""Grows when the entries were mended: dictionaries made from them and the journal are worth nothing then."""
DIRTY: Final = 1
TICK: Final = 2
JOURNAL_END: Final = 3
EVICTIONS: Final = 4
CORRUPT: Final = 5
USABLE_SLOTS: Final = 6
"""Slots that have memory behind them; the rest gets it when it is needed."""
COUNTERS: Final = 8


class HostIndex:
    """The entries of a store, as one process sees and changes them. Everything but `leading`, `changes` and the counts
    is called with the store's lock held, between `begin` and the end of that block.

    Blocks are named by `NAME_BYTES` bytes that no two contents share (the engine's own chain of cryptographic hashes),
    and known to the mesh by its 64-bit hashes, which only say where to look.
    """

    def __init__(
        self,
        counters: NDArray[np.uint64],
        entries: NDArray[Any],
        journal: NDArray[np.uint32],
        is_alive: Callable[[int], bool],
        client: int | None = None,
    ) -> None:
        """`counters` has COUNTERS numbers, `journal` any number of slots. `is_alive`: whether the process of a number
        lives. `client`: this process's number; None: it only looks."""
        self.client = client
        self._counters = counters
        self._entries = entries
        self._journal = journal
        self._is_alive = is_alive
        self._epoch: int | None = None
        self._followed = 0
        """How much of the journal was taken in."""
        self._ready: dict[bytes, int] = {}
        self._writing: dict[bytes, int] = {}
        self._seen: dict[int, tuple[bytes, int, int]] = {}
        """Of each slot that is not free: name, hash in the mesh, state."""
        self._copies: dict[int, int] = {}
        """By hash in the mesh: slots that are ready. Two contents may share one, though hardly ever."""
        self._changed: dict[int, bool] = {}
        self._is_cleared = True
        self._pinned: dict[int, int] = {}
        """Own pins by slot: how often."""

    def __len__(self) -> int:
        """Blocks that can be read, as far as this process has followed."""
        return len(self._ready)

    @property
    def slots(self) -> int:
        """Blocks that the store has room for."""
        return len(self._entries)

    @property
    def usable_slots(self) -> int:
        """Slots that have memory behind them."""
        return int(self._counters[USABLE_SLOTS])

    @property
    def evictions_total(self) -> int:
        """Blocks that went to make room, of all processes."""
        return int(self._counters[EVICTIONS])

    @property
    def corrupt_total(self) -> int:
        """Blocks whose content was not what was written, of all processes."""
        return int(self._counters[CORRUPT])

    @property
    def is_followed(self) -> bool:
        """Whether nothing has changed since the last `begin`; may be asked without the lock."""
        return self._epoch == int(self._counters[EPOCH]) and self._followed == int(self._counters[JOURNAL_END])

    # -- what is known without the lock

    def leading(self, names: Sequence[bytes]) -> int:
        """How many of a chain's leading blocks can be read."""
        for count, name in enumerate(names):
            if name not in self._ready:
                return count
        return len(names)

    def lacks(self, name: bytes) -> bool:
        """Whether nobody has stored the block or is about to."""
        return name not in self._ready and name not in self._writing

    @property
    def has_changes(self) -> bool:
        """Whether `changes` has something to say."""
        return self._is_cleared or bool(self._changed)

    def changes(self) -> tuple[bool, list[int], list[int]]:
        """What has changed since the last call, in the mesh's hashes: whether everything before is to be forgotten,
        what can be read now, and what no more."""
        cleared, changed = self._is_cleared, self._changed
        self._is_cleared, self._changed = False, {}
        stored = [mesh_hash for mesh_hash, is_stored in changed.items() if is_stored]
        removed = [mesh_hash for mesh_hash, is_stored in changed.items() if not is_stored]
        return cleared, stored, removed

    # -- with the lock

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Around every change: mends what a killed process has left, and takes in what others did. One that is killed
        within leaves the mark."""
        if self._counters[DIRTY]:
            self._mend()
        self._follow()
        self._count(DIRTY, 1)
        yield
        self._follow()
        self._count(DIRTY, 0)

    def claim(self, client: int) -> None:
        """This process has the number from now on; what a former one of it held is free."""
        self.client = client
        self._release_all(client)

    def reap(self) -> None:
        """Free what processes held that are dead."""
        entries = self._entries[: self.usable_slots]
        held = int(np.bitwise_or.reduce(entries["pins"], initial=np.uint64(0)))
        writers = set(entries["writer"][entries["state"] == WRITING].tolist())
        for client in range(MAX_CLIENTS):
            is_holding = held >> client & 1 or client in writers
            if is_holding and client != self.client and not self._is_alive(client):
                self._release_all(client)

    def pin(self, names: Sequence[bytes], *, is_use: bool = True) -> list[int]:
        """The slots of a chain's leading blocks, which stay as they are until `unpin`. Unless it `is_use`, they go as
        soon afterwards as they would have."""
        slots = [self._ready[name] for name in names[: self.leading(names)]]
        if is_use:
            self._touch(slots)
        for slot in slots:
            self._pinned[slot] = self._pinned.get(slot, 0) + 1
            if self._pinned[slot] == 1:
                self._put(slot, "pins", int(self._entries["pins"][slot]) | self._bit)
        return slots

    def unpin(self, slots: Sequence[int]) -> None:
        """They may go again."""
        for slot in slots:
            self._pinned[slot] -= 1
            if not self._pinned[slot]:
                del self._pinned[slot]
                self._put(slot, "pins", int(self._entries["pins"][slot]) & ~self._bit)

    def checksum(self, slot: int) -> int:
        """Of the content that was written to a block that is pinned; without the lock, too."""
        return int(self._entries["checksum"][slot])

    def mesh_hash(self, slot: int) -> int:
        """Of a block that is pinned; without the lock, too."""
        return int(self._entries["mesh_hash"][slot])

    def name(self, slot: int) -> bytes:
        """Of a block that is pinned or being written by this process; without the lock, too."""
        return bytes(self._entries["name"][slot])

    @property
    def free_slots(self) -> int:
        """Slots with memory that hold nothing."""
        return int(np.count_nonzero(self._entries["state"][: self.usable_slots] == FREE))

    def reserve(self, names: Sequence[bytes], first: int, most: int) -> list[tuple[int, int]]:
        """Slots to write those of names[first:] to which are lacking, at most so many: (which, slot). `names` is a
        whole chain. What comes before the first that finds no room is stored, what comes behind it is not: without its
        predecessors no block is of use.

        Blocks of this chain never go for it: a chain longer than the store keeps its beginning.
        """
        self._take_from_dead(names[first:])
        before = int(self._counters[TICK])
        present = [self._ready[name] for name in names if name in self._ready]
        self._touch(present)
        wanted = [index for index in range(first, len(names)) if self.lacks(names[index])][:most]
        slots = self._find_room(len(wanted), before)
        found = list(zip(wanted, slots, strict=False))
        for index, slot in found:
            self._put(slot, "name", np.void(names[index]))
            self._put(slot, "writer", self._number)
            self._put(slot, "state", WRITING)
            self._note(slot)
        fresh = {names[index]: slot for index, slot in found}
        chain = (self._ready.get(name, fresh.get(name)) for name in names)
        self._touch([slot for slot in chain if slot is not None])
        return found

    def commit(self, slot: int, mesh_hash: int, checksum: int) -> bool:
        """The content is written: from now on the block can be read. False if the slot is no longer this process's,
        which was taken for dead."""
        entries = self._entries
        if entries["state"][slot] != WRITING or entries["writer"][slot] != self._number:
            return False
        self._put(slot, "mesh_hash", mesh_hash)
        self._put(slot, "checksum", checksum)
        self._put(slot, "guard", self._guard_of(slot))
        self._put(slot, "state", READY)
        self._note(slot)
        return True

    def abandon(self, slot: int) -> None:
        """Nothing will be written there."""
        if self._entries["state"][slot] == WRITING and self._entries["writer"][slot] == self._number:
            self._free(slot)

    def discard(self, slot: int) -> None:
        """The block does not hold what was written: nobody is to read it. Its readers keep their pins."""
        self._count(CORRUPT, self.corrupt_total + 1)
        self._free(slot)

    def grow(self, usable_slots: int) -> None:
        """So many slots have memory behind them."""
        self._count(USABLE_SLOTS, usable_slots)

    def used_order(self, names: Sequence[bytes]) -> list[int]:
        """When each was used last, on no particular scale; for those that can be read."""
        return [int(self._entries["used"][self._ready[name]]) for name in names]

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`. With the lock held and nothing under way."""
        entries, usable = self._entries, self.usable_slots
        assert usable <= self.slots, "what has memory is within the store"
        assert not entries["state"][usable:].any(), "nothing lies where no memory is"
        assert not (entries["state"] > READY).any(), "entries are free, written to, or can be read"
        ready = np.flatnonzero(entries["state"] == READY).tolist()
        assert all(int(entries["guard"][slot]) == self._guard_of(slot) for slot in ready), (
            "entries vouch for themselves"
        )
        names = [bytes(entries["name"][slot]) for slot in ready]
        assert len(set(names)) == len(names), "each block lies in one place"
        if self.is_followed:
            assert self._ready == dict(zip(names, ready, strict=True)), "this process knows all that is there"

    # -- inside

    @property
    def _number(self) -> int:
        assert self.client is not None, "a process that changes anything has a number"
        return self.client

    @property
    def _bit(self) -> int:
        return 1 << self._number

    def _put(self, slot: int, field: str, value: Any) -> None:
        """Every change of an entry, one field at a time: a process may be killed before any of them."""
        self._entries[field][slot] = value

    def _count(self, counter: int, value: int) -> None:
        """Every change of a number."""
        self._counters[counter] = value

    def _guard_of(self, slot: int) -> int:
        entry = self._entries[slot]
        content = entry["mesh_hash"].tobytes() + entry["checksum"].tobytes() + entry["name"].tobytes()
        return xxh3_64_intdigest(content, slot + 1)

    def _note(self, slot: int) -> None:
        """Tell the other processes of a change that was made."""
        end = int(self._counters[JOURNAL_END])
        self._journal[end % len(self._journal)] = slot
        self._count(JOURNAL_END, end + 1)

    def _free(self, slot: int) -> None:
        self._put(slot, "state", FREE)
        self._put(slot, "guard", 0)
        self._put(slot, "writer", NOBODY)
        self._note(slot)

    def _touch(self, slots: Sequence[int]) -> None:
        """A chain's blocks were used now. Its end counts as used before its beginning, so that it goes first."""
        if slots:
            tick = int(self._counters[TICK])
            self._entries["used"][np.asarray(slots)] = np.arange(tick + len(slots), tick, -1, dtype=np.uint64)
            self._count(TICK, tick + len(slots))

    def _find_room(self, wanted: int, used_by: int) -> list[int]:
        """At most so many slots, free ones first and then those used longest ago, none later than `used_by`."""
        slots = self._room(wanted, used_by)
        if len(slots) < wanted:
            self.reap()
            slots = self._room(wanted, used_by)
        for slot in slots:
            if self._entries["state"][slot] == READY:
                self._count(EVICTIONS, self.evictions_total + 1)
                self._free(slot)
                self._forget(slot)
        return slots

    def _room(self, wanted: int, used_by: int) -> list[int]:
        entries = self._entries[: self.usable_slots]
        # A block may have been found corrupt while others read it: its slot is free, and still read.
        idle = entries["pins"] == 0
        slots: list[int] = np.flatnonzero((entries["state"] == FREE) & idle)[:wanted].tolist()
        missing = wanted - len(slots)
        if missing:
            evictable = np.flatnonzero((entries["state"] == READY) & idle & (entries["used"] <= used_by))
            if missing < len(evictable):
                evictable = evictable[np.argpartition(entries["used"][evictable], missing - 1)[:missing]]
            slots += evictable.tolist()
        return slots

    def _take_from_dead(self, names: Sequence[bytes]) -> None:
        """Blocks that a dead process was writing are lacking."""
        slots = [self._writing[name] for name in names if name in self._writing]
        for client in {int(self._entries["writer"][slot]) for slot in slots}:
            if not self._is_writing(client):
                self._release_all(client)
        if slots:
            self._follow()

    def _release_all(self, client: int) -> None:
        entries, bit = self._entries, np.uint64(1 << client)
        for slot in np.flatnonzero(entries["pins"] & bit).tolist():
            self._put(slot, "pins", int(entries["pins"][slot]) & ~int(bit))
        for slot in np.flatnonzero((entries["state"] == WRITING) & (entries["writer"] == client)).tolist():
            self._free(slot)

    def _mend(self) -> None:
        """Whoever had the lock was killed in the midst of a change: keep what vouches for itself."""
        entries, names = self._entries, set()
        for slot in np.flatnonzero(entries["state"] != FREE).tolist():
            state, name = int(entries["state"][slot]), bytes(entries["name"][slot])
            is_whole = slot < self.usable_slots and name not in names
            if state == READY:
                is_whole = is_whole and int(entries["guard"][slot]) == self._guard_of(slot)
            else:
                is_whole = is_whole and state == WRITING and self._is_writing(int(entries["writer"][slot]))
            if is_whole:
                names.add(name)
            else:
                self._put(slot, "state", FREE)
        self._count(EPOCH, int(self._counters[EPOCH]) + 1)
        self._count(DIRTY, 0)

    def _is_writing(self, client: int) -> bool:
        return client < MAX_CLIENTS and (client == self.client or self._is_alive(client))

    def _follow(self) -> None:
        """Take in what has changed since the last time."""
        epoch, end = int(self._counters[EPOCH]), int(self._counters[JOURNAL_END])
        if epoch != self._epoch or end - self._followed > len(self._journal) or end < self._followed:
            self._start_anew()
            slots = np.flatnonzero(self._entries["state"] != FREE).tolist()
        else:
            places = np.arange(self._followed, end) % len(self._journal)
            slots = list(dict.fromkeys(self._journal[places].tolist()))
        self._epoch, self._followed = epoch, end
        # All of them first: a block may have gone from one of these slots and come back in another.
        for slot in slots:
            self._forget(slot)
        for slot in slots:
            self._look_at(slot)

    def _start_anew(self) -> None:
        self._ready, self._writing, self._seen, self._copies = {}, {}, {}, {}
        self._changed, self._is_cleared = {}, True

    def _look_at(self, slot: int) -> None:
        entry = self._entries[slot]
        state, name, mesh_hash = int(entry["state"]), bytes(entry["name"]), int(entry["mesh_hash"])
        if state == FREE:
            return
        self._seen[slot] = name, mesh_hash, state
        if state == WRITING:
            self._writing[name] = slot
            return
        self._ready[name] = slot
        copies = self._copies[mesh_hash] = self._copies.get(mesh_hash, 0) + 1
        if copies == 1:
            self._tell(mesh_hash, is_stored=True)

    def _forget(self, slot: int) -> None:
        seen = self._seen.pop(slot, None)
        if seen is None:
            return
        name, mesh_hash, state = seen
        if state == WRITING:
            self._writing.pop(name, None)
            return
        self._ready.pop(name, None)
        self._copies[mesh_hash] -= 1
        if not self._copies[mesh_hash]:
            del self._copies[mesh_hash]
            self._tell(mesh_hash, is_stored=False)

    def _tell(self, mesh_hash: int, *, is_stored: bool) -> None:
        if self._changed.get(mesh_hash) == (not is_stored):
            del self._changed[mesh_hash]
        else:
            self._changed[mesh_hash] = is_stored
