"""How fast blocks go into a host's store and come out of it: `python -m benchmarks.host_tier`.

One process, CPU only: what a copy to or from a GPU would add is not in it.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_worker.host_tier.index import NAME_BYTES
from engine_worker.host_tier.settings import HostTierSettings, open_disk, open_store
from engine_worker.host_tier.store import HostStore

_ROUND_BLOCKS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk-directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        figures = measure(Path(directory) / "stores", options.block_kib << 10, options.blocks)
    with tempfile.TemporaryDirectory(dir=options.disk_directory) as directory:
        figures |= measure_disk(Path(directory) / "stores", options.block_kib << 10, options.blocks)
    for name, value in figures.items():
        print(f"{name:>28} {value:10.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures))


def measure(directory: Path, block_bytes: int, blocks: int) -> dict[str, float]:
    """GB written (into fresh and into used memory) and read in a second of CPU, both with checksums; microseconds of
    CPU of a look at a chain of all blocks, and of one to be pinned and let go."""
    nbytes = int(1.2 * blocks * block_bytes) + (4 << 20)
    store = open_store("bench", block_bytes, HostTierSettings(nbytes, str(directory)))
    content = np.random.default_rng(1).integers(0, 256, block_bytes, np.uint8)
    moved = blocks * block_bytes / 1e9
    figures = {
        "write_fresh_gb_per_s": moved / _timed(lambda: _write(store, _names(1, blocks), content)),
        "write_rest_gb_per_s": moved / _timed(lambda: _write(store, _names(2, blocks), content)),
        "write_used_gb_per_s": moved / _timed(lambda: _write(store, _names(3, blocks), content)),
        "read_gb_per_s": moved / _timed(lambda: _read(store, _names(3, blocks), content)),
    }
    del figures["write_rest_gb_per_s"]  # partly into fresh memory
    names = _names(3, blocks)
    figures["look_us"] = 1e6 * min(_timed(lambda: store.leading(names)) for _ in range(5))
    figures["pin_and_unpin_us"] = 1e6 * min(_timed(lambda: store.unpin(store.pin(names[:1]))) for _ in range(20))
    store.close()
    return figures


def measure_disk(directory: Path, block_bytes: int, blocks: int) -> dict[str, float]:
    """GB written to the store on disk and read from it (as the kernel has it cached) in a second of CPU."""
    nbytes = int(1.2 * blocks * block_bytes) + (4 << 20)
    store = open_disk("bench", block_bytes, HostTierSettings(nbytes, disk_nbytes=nbytes, disk_directory=str(directory)))
    assert store is not None, "the log says why"
    content, names = np.random.default_rng(1).integers(0, 256, block_bytes, np.uint8), _names(1, blocks)
    into, moved = np.empty_like(content), blocks * block_bytes / 1e9
    written_s = _timed(lambda: [store.write(names, index, content, index) for index in range(blocks)])
    read_s = _timed(lambda: [store.read(names[index : index + 1], [into]) for index in range(blocks)])
    store.close()
    return {"disk_write_gb_per_s": moved / written_s, "disk_read_gb_per_s": moved / read_s}


def _names(chain: int, blocks: int) -> list[bytes]:
    return [chain.to_bytes(4, "little") + block.to_bytes(NAME_BYTES - 4, "little") for block in range(blocks)]


def _write(store: HostStore, names: list[bytes], content: NDArray[np.uint8]) -> None:
    for first in range(0, len(names), _ROUND_BLOCKS):
        end = min(len(names), first + _ROUND_BLOCKS)
        reserved = store.reserve(names[:end], first, _ROUND_BLOCKS)
        for _, slot in reserved:
            store.view(slot)[:] = content
        store.commit([(slot, which) for which, slot in reserved])


def _read(store: HostStore, names: list[bytes], into: NDArray[np.uint8]) -> None:
    slots = store.pin(names)
    for slot in slots:
        assert store.is_whole(slot)
        into[:] = store.view(slot)
    store.unpin(slots)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


if __name__ == "__main__":
    main()
