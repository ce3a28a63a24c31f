"""KV memory in its three forms."""

import numpy as np
import pytest

from engine_worker.kv.layout import KvLayout
from engine_worker.kv.memory import BlockBytesMemory, KvMemory, RegionMemory
from engine_worker.kv.plan import Message, RegionBlocks
from engine_worker.kv.staging import StagingRing, place
from mesh.errors import ConfigurationError


def memory_of(*regions: np.ndarray) -> RegionMemory:
    return RegionMemory(regions, model="m", dtype="uint8", block_tokens=16)


def blocks_of(*ids: int) -> RegionBlocks:
    """Blocks of the first region."""
    return RegionBlocks(0, np.array(ids))


def numbered(blocks: int, block_bytes: int) -> np.ndarray:
    return np.arange(blocks * block_bytes, dtype=np.uint32).astype(np.uint8).reshape(blocks, block_bytes)


def test_dense_blocks_are_seen_in_place() -> None:
    region = numbered(8, 32)
    view = memory_of(region).view(0, 2, 3)
    assert view is not None
    view[:] = 7
    assert (region[2:5] == 7).all()
    assert not (region[[1, 5]] == 7).all()


def test_blocks_with_gaps_between_are_seen_one_by_one() -> None:
    whole = numbered(8, 64)
    memory = memory_of(whole[:, :32], whole[:, 32:])
    assert memory.layout.region_block_bytes == (32, 32)
    assert memory.view(1, 2, 2) is None
    one = memory.view(1, 2, 1)
    assert one is not None
    assert (one == whole[2, 32:]).all()


@pytest.mark.slow
def test_a_torch_tensor_is_shared_not_copied() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    memory = memory_of(tensor.view(torch.uint8).reshape(4, -1).numpy())
    view = memory.view(0, 1, 1)
    assert view is not None
    view[:] = np.frombuffer(np.full(16, 0x3F80, np.uint16).tobytes(), np.uint8)
    assert (tensor[1] == 1.0).all()
    assert (tensor[[0, 2, 3]] == 0.0).all()


def simulated(content: dict[int, bytes]) -> BlockBytesMemory:
    layout = KvLayout("m", "bytes", 16, (32,))
    return BlockBytesMemory(layout, 8, content.__getitem__, content.__setitem__)


@pytest.mark.parametrize("kind", ["regions", "bytes"])
async def test_gathered_blocks_are_scattered_to_their_places(kind: str) -> None:
    blocks = numbered(8, 32)
    kept = blocks.copy()
    content = {index: blocks[index].tobytes() for index in range(8)}
    memory: KvMemory = memory_of(blocks) if kind == "regions" else simulated(content)
    buffer = StagingRing(memory, buffers=2, gathered_bytes=128).buffer(3, 96)
    await memory.gather([blocks_of(4, 5), blocks_of(1)], buffer)
    await memory.scatter([blocks_of(6), blocks_of(2, 3)], buffer)
    now = blocks if kind == "regions" else np.stack([np.frombuffer(content[i], np.uint8) for i in range(8)])
    assert (now == kept[[0, 1, 5, 1, 4, 5, 4, 7]]).all()


@pytest.mark.parametrize("ids", [(1, 2, 5), (1, 3, 2, 4), (3, 2, 1)])
def test_blocks_in_pieces_have_no_place(ids: tuple[int, ...]) -> None:
    memory = memory_of(numbered(8, 32))
    assert place(memory, Message((blocks_of(*ids),), 96)) is None


def test_consecutive_blocks_of_one_region_have_a_place() -> None:
    region = numbered(8, 32)
    memory = memory_of(region, numbered(8, 32))
    seen = place(memory, Message((blocks_of(2, 3, 4),), 96))
    assert seen is not None
    assert np.shares_memory(seen, region)
    assert (seen == region[2:5].reshape(-1)).all()
    assert place(memory, Message((blocks_of(2), RegionBlocks(1, np.array([3]))), 64)) is None
    assert place(simulated({}), Message((blocks_of(1),), 32)) is None


@pytest.mark.parametrize("ids", [(0, 8), (-1, 0)])
async def test_blocks_that_there_are_not_are_never_read(ids: tuple[int, ...]) -> None:
    with pytest.raises(IndexError, match="there are 8"):
        await memory_of(numbered(8, 32)).gather([blocks_of(*ids)], np.empty(64, np.uint8))


def test_a_ring_reuses_its_buffers() -> None:
    ring = StagingRing(memory_of(numbered(8, 32)), buffers=2, gathered_bytes=64)
    first, second, third = (ring.buffer(number, 64) for number in range(3))
    assert np.shares_memory(first, third)
    assert not np.shares_memory(first, second)
    assert ring.buffer(4, 100).size == 100
    assert ring.buffer(6, 30).size == 30


@pytest.mark.parametrize(
    "regions", [[], [np.zeros((4, 8), np.float32)], [np.zeros(8, np.uint8)], [numbered(4, 8), numbered(5, 8)]]
)
def test_regions_of_another_shape_are_refused(regions: list[np.ndarray]) -> None:
    with pytest.raises(ConfigurationError):
        memory_of(*regions)
