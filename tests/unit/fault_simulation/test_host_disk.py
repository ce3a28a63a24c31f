"""The simulated disk of a host: whatever happens to it, its store gives back what was written, or nothing."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.host_tier.disk_store import DiskStore
from fault_simulation.host_disk import SimulatedHostDisk, open_simulated
from fault_simulation.run import build, run_timeline
from fault_simulation.timeline import MODEL, KillInWrite, LosePower, Request, Timeline, Topology
from tests.unit.engine_worker.host_tier.test_shared_memory import names_of

BLOCK_BYTES = 64
SLOTS = 12


def content_of(name: bytes) -> np.ndarray:
    return np.frombuffer((name * (BLOCK_BYTES // len(name) + 1))[:BLOCK_BYTES], np.uint8)


class Process:
    """A process that uses the disk until it is killed."""

    def __init__(self, disk: SimulatedHostDisk) -> None:
        self.lives = True
        self.store: DiskStore = open_simulated(disk, lambda: self.lives, "worker-0")

    def write(self, chain: int, blocks: int) -> int:
        """How many it lacked and has now."""
        names = names_of(chain, blocks)
        return sum(self.store.write(names, index, content_of(name), index) for index, name in enumerate(names))

    def read(self, chain: int, blocks: int) -> int:
        """How many came; each of them is what was written."""
        self.store.changes()
        names, into = names_of(chain, blocks), [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(blocks)]
        hashes = self.store.read(names, into)
        for name, block in zip(names[: len(hashes)], into, strict=False):
            assert (block == content_of(name)).all()
        return len(hashes)

    def die(self, name: str) -> None:
        assert name == "worker-0"
        self.lives = False


def disk_of(seed: int = 1) -> SimulatedHostDisk:
    return SimulatedHostDisk("disk", SLOTS, BLOCK_BYTES, random.Random(seed))


def test_a_full_disk_stores_nothing_and_keeps_what_it_has() -> None:
    disk = disk_of()
    process = Process(disk)
    assert process.write(1, 4) == 4
    disk.is_full = True
    assert process.write(2, 4) == 0
    assert (process.read(1, 4), process.read(2, 4)) == (4, 0)
    disk.is_full = False
    assert process.write(2, 4) == 4
    assert process.read(2, 4) == 4
    assert not disk.held()


def test_what_a_killed_process_was_writing_is_nobodys_and_its_slot_is_free_again() -> None:
    disk = disk_of()
    process, other = Process(disk), Process(disk)
    assert process.write(1, 2) == 2
    disk.on_write = process.die
    assert process.write(2, 1) == 0
    assert not process.lives
    assert disk.on_write is None, "once"
    assert other.read(1, 2) == 2
    assert other.write(2, SLOTS) == SLOTS, "of which the dead one had one"
    assert other.read(2, SLOTS) == SLOTS
    assert not disk.held()
    disk.validate()


@given(
    st.integers(0, 2**32), st.lists(st.sampled_from(("write", "read", "full", "kill", "power", "change")), max_size=30)
)
def test_what_is_read_is_what_was_written(seed: int, events: list[str]) -> None:
    rng, disk = random.Random(seed), disk_of(seed)
    processes = [Process(disk) for _ in range(2)]
    for event in events:
        process = rng.choice(processes)
        match event:
            case "write":
                process.write(rng.randrange(5), rng.randint(1, 6))
            case "read":
                process.read(rng.randrange(5), 6)
            case "full":
                disk.is_full = not disk.is_full
            case "kill":
                disk.on_write = process.die
                process.write(rng.randrange(5), 1)
                disk.on_write = None
            case "power":
                for each in processes:
                    each.lives = False
                disk.lose_power()
            case "change":
                disk.change_blocks(0.3, rng)
        processes = [each if each.lives else Process(disk) for each in processes]
        disk.validate()
        assert not disk.held()
    disk.is_full = False
    for chain in range(5):
        assert processes[0].write(chain, SLOTS) >= 0
        assert processes[0].read(chain, SLOTS) <= SLOTS


def asked(number: int, at_s: float, story: int) -> Request:
    prompt = f"Story {story}. " + "And so it went on. " * 60
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "stream": True}
    return Request(number, at_s, "/v1/completions", body)


def test_answers_are_exact_whatever_becomes_of_the_disk_under_a_mesh() -> None:
    requests = tuple(asked(number, 4.0 + number, number % 4) for number in range(20))
    topology = Topology(host_kv_blocks=120, disk_kv_blocks=1000)
    faults = KillInWrite(5.5, 1.0), LosePower(12.0, 1.0)
    timeline = Timeline(1, topology, requests, faults)
    mesh = build(timeline)
    outcome = run_timeline(timeline, mesh)
    assert not outcome.violations, "\n".join(map(str, outcome.violations))
    (disk,) = mesh.host_disks.values()
    assert disk.on_write is None
    assert mesh.machines["worker-0"].lives + mesh.machines["worker-1"].lives == 5, (
        "one was killed in a write, then both"
    )
    assert disk.reads > 20, "what the memory lost came back from the disk"
