"""Between instances of any two shapes, every head of every layer comes from a rank that has it, and to its place."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_worker.kv.layout import KvLayout, Region, layout_mismatch
from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.plan import RegionBlocks
from engine_worker.kv.regions import Part, part_block_bytes, part_refusal, plan_sources, whole
from mesh.errors import KvTransferRefused

BLOCKS = 3


@dataclass(frozen=True)
class Model:
    """What both instances serve. `runs` is how their blocks are laid out: 1 head by head, else token by token."""

    layers: int
    heads: int
    runs: int
    head_bytes: int

    def content(self, layer: int) -> NDArray[np.uint8]:
        """Blocks x runs x heads x bytes, no two heads alike."""
        shape = (BLOCKS, self.runs, self.heads, self.head_bytes)
        return np.random.default_rng(layer).integers(0, 256, shape, np.uint8)


@dataclass(frozen=True)
class Shape:
    tensor: int
    pipeline: int


def shard(model: Model, shape: Shape, rank: int, *, is_filled: bool) -> RegionMemory:
    """The memory of one rank, as vLLM spreads layers and heads."""
    stage, share = divmod(rank, shape.tensor)
    heads = max(1, model.heads // shape.tensor)
    first_head = share * model.heads // shape.tensor
    mine = range(stage * model.layers // shape.pipeline, (stage + 1) * model.layers // shape.pipeline)
    arrays = []
    for layer in mine:
        content = model.content(layer)[:, :, first_head : first_head + heads]
        # Blocks need not follow each other closely.
        array = np.zeros((BLOCKS, content[0].size + 3), np.uint8)[:, :-3]
        array[:] = content.reshape(BLOCKS, -1) if is_filled else 0
        arrays.append(array)
    regions = [Region(f"layer {layer}", first_head, heads, model.runs, model.head_bytes) for layer in mine]
    return RegionMemory(
        arrays,
        model="m",
        dtype="uint8",
        block_tokens=4,
        named=regions,
        rank=rank,
        ranks=shape.tensor * shape.pipeline,
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    return Model(draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 4])), 2)


@st.composite
def shapes(draw: st.DrawFn, layers: int) -> Shape:
    return Shape(draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, min(3, layers))))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Model, Shape, Shape]:
    model = draw(models())
    return model, draw(shapes(model.layers)), draw(shapes(model.layers))


@given(pairs())
@example((Model(4, 4, 1, 2), Shape(4, 1), Shape(2, 1)))
@example((Model(4, 2, 4, 2), Shape(1, 2), Shape(8, 1)))  # four ranks of the target have the same head
async def test_every_rank_has_its_layers_and_heads_afterwards(pair: tuple[Model, Shape, Shape]) -> None:
    model, source_shape, target_shape = pair
    sources = [shard(model, source_shape, rank, is_filled=True) for rank in ranks(source_shape)]
    for rank in ranks(target_shape):
        target = shard(model, target_shape, rank, is_filled=False)
        assert not any(layout_mismatch(target.layout, source.layout) for source in sources)
        for source, theirs, ours in plan_sources(target.layout, [each.layout for each in sources]):
            assert part_refusal(sources[source].layout, theirs) == ""
            there, here = sources[source].part(theirs), target.part(ours)
            assert there.layout.region_block_bytes == here.layout.region_block_bytes
            assert there.layout.region_block_bytes == part_block_bytes(sources[source].layout, theirs)
            blocks = [RegionBlocks(number, np.arange(BLOCKS)) for number in range(len(theirs))]
            buffer = there.staging(BLOCKS * there.layout.block_bytes)
            await there.gather(blocks, buffer)
            await here.scatter(blocks, buffer)
        expected = shard(model, target_shape, rank, is_filled=True)
        for region, wanted in zip(target._regions, expected._regions, strict=True):
            assert (region == wanted).all()


@given(pairs())
def test_nothing_is_fetched_twice(pair: tuple[Model, Shape, Shape]) -> None:
    model, source_shape, target_shape = pair
    layouts = [shard(model, source_shape, rank, is_filled=False).layout for rank in ranks(source_shape)]
    for rank in ranks(target_shape):
        target = shard(model, target_shape, rank, is_filled=False).layout
        plan = plan_sources(target, layouts)
        assert sum(sum(part_block_bytes(target, ours)) for *_, ours in plan) == target.block_bytes
        assert len({source for source, *_ in plan}) == len(plan)


@given(models(), st.data())
def test_ranks_of_equal_shapes_move_all_they_have_in_one_piece(model: Model, data: st.DataObject) -> None:
    shape = data.draw(shapes(model.layers))
    layouts = [shard(model, shape, rank, is_filled=False).layout for rank in ranks(shape)]
    for target in layouts:
        ((source, theirs, ours),) = plan_sources(target, layouts)
        assert theirs == ours == whole(target)
        if shape.tensor <= model.heads:
            assert source == target.rank


def test_ranks_with_the_same_heads_share_the_work() -> None:
    model = Model(1, 1, 1, 2)
    sources = [shard(model, Shape(2, 1), rank, is_filled=False).layout for rank in range(2)]
    targets = [shard(model, Shape(4, 1), rank, is_filled=False).layout for rank in range(4)]
    assert [plan_sources(target, sources)[0].rank for target in targets] == [0, 1, 0, 1]


def test_what_the_source_lacks_is_refused() -> None:
    first, second = (shard(Model(2, 2, 1, 2), Shape(1, 2), rank, is_filled=False).layout for rank in range(2))
    with pytest.raises(KvTransferRefused, match="head 0 of layer 1"):
        plan_sources(second, [first])
    wider = shard(Model(1, 2, 1, 4), Shape(1, 1), 0, is_filled=False).layout
    with pytest.raises(KvTransferRefused, match="1 pieces of 2 bytes here and in 1 of 4 at rank 0"):
        plan_sources(first, [wider])


def test_memory_that_names_no_regions_moves_whole_and_from_one_rank() -> None:
    unnamed = KvLayout("m", "uint8", 4, (8,))
    assert plan_sources(unnamed, [unnamed]) == [(0, (), ())]
    with pytest.raises(KvTransferRefused, match="2 ranks"):
        plan_sources(unnamed, [unnamed, unnamed])
    assert "region 0 is asked for" in part_refusal(unnamed, [Part(0, 0, 1)])


@pytest.mark.parametrize("part", [Part(0, 0, 0), Part(0, 1, 2), Part(0, -1, 1), Part(1, 0, 1), Part(-1, 0, 1)])
def test_parts_that_are_not_there_are_refused(part: Part) -> None:
    layout = shard(Model(1, 2, 1, 2), Shape(1, 1), 0, is_filled=False).layout
    assert part_refusal(layout, whole(layout)) == ""
    assert part_refusal(layout, [part])


def ranks(shape: Shape) -> range:
    return range(shape.tensor * shape.pipeline)
