"""vLLM's KV tensors, in each order in which it stores a block: which heads lie where."""

import numpy as np
import pytest

from engine_worker.kv.layout import Region
from engine_worker.kv.plan import RegionBlocks
from engine_worker.kv.regions import plan_sources

torch = pytest.importorskip("torch")

from engine_worker.engines.vllm.connector.memory import EngineMemory, RankShape  # noqa: E402  imports torch

BLOCKS, TOKENS, CONTENT = 3, 4, 6


def cache(heads: int, order: str) -> "torch.Tensor":
    """As vLLM 0.32 names dimensions: blocks, heads, tokens, content; in memory heads or tokens come first."""
    if order == "heads first":
        return torch.zeros(BLOCKS, heads, TOKENS, CONTENT)
    return torch.zeros(BLOCKS, TOKENS, heads, CONTENT).permute(0, 2, 1, 3)


def memory(tensor: "torch.Tensor", shape: RankShape) -> EngineMemory:
    return EngineMemory(
        {"layer": tensor},
        blocks=BLOCKS,
        staging_blocks=2,
        model="m",
        block_tokens=TOKENS,
        shape=shape,
        sends_device_memory=False,
    )


@pytest.mark.parametrize(("order", "runs"), [("heads first", 1), ("tokens first", TOKENS)])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_rank_knows_its_heads_and_where_they_lie(order: str, runs: int, heads: int) -> None:
    layout = memory(cache(heads, order), RankShape(1, 2, total_heads=2 * heads)).layout
    assert layout.regions == (Region("layer", heads, heads, runs, TOKENS * CONTENT * 4 // runs),)
    assert (layout.rank, layout.ranks, layout.block_bytes) == (1, 2, heads * TOKENS * CONTENT * 4)


@pytest.mark.parametrize("order", ["heads first", "tokens first"])
async def test_one_head_of_two_is_a_part_in_the_engines_and_in_staging_memory(order: str) -> None:
    tensor = cache(2, order)
    whole = memory(tensor, RankShape(total_heads=2))
    half = memory(cache(1, order), RankShape(1, 2, total_heads=2))
    ((_, theirs, ours),) = plan_sources(half.layout, [whole.layout])
    part = whole.part(theirs)
    assert part.layout.region_block_bytes == half.layout.region_block_bytes
    assert [each.heads for each in ours] == [1]
    whole._staged[0].zero_()
    content = part.staging(2 * part.layout.block_bytes)
    content[:] = 255
    await part.scatter([RegionBlocks(0, np.array([1, whole.first_staging]))], content)
    untouched, written = tensor[1].view(torch.uint8)
    assert not untouched.any()
    assert written.all()
    assert whole._staged[0][0].sum() == 255 * half.layout.block_bytes


def test_where_there_are_more_ranks_than_heads_some_have_the_same() -> None:
    firsts = [RankShape(rank, 4, total_heads=2).first_head() for rank in range(4)]
    assert firsts == [0, 0, 1, 1]
    assert RankShape(3, 4, 1, 2).rank == 7


def test_latents_belong_to_every_rank() -> None:
    tensor = torch.zeros(BLOCKS, TOKENS, CONTENT)
    layouts = [memory(tensor, RankShape(rank, 2, total_heads=8, has_latents=True)).layout for rank in range(2)]
    assert layouts[0].regions == layouts[1].regions == (Region("layer", 0, 1, 1, TOKENS * CONTENT * 4),)
