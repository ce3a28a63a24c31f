"""Blocks that leave one instance and enter another: only the right bytes are taken."""

from dataclasses import replace

import pytest

from controlplane.model.request import EngineRequest, SamplingParams
from mesh.errors import IllegalTransition, KvBlockCorrupt, RequestRefused
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig, OutputConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance
from simulator.instance.sequence import SequenceState

CONFIG = InstanceConfig(
    block_tokens=4,
    kv_blocks=20,
    max_model_len_tokens=80,
    max_batch_requests=4,
    max_step_tokens=64,
    block_bytes=256,
    output=OutputConfig(vocabulary_tokens=100, first_token_id=3, last_token_id=99),
)
SAMPLING = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
REQUEST = EngineRequest("a", tuple(range(3, 13)), SAMPLING)


def step(instance: SimulatedInstance, steps: int) -> list[int]:
    said: list[int] = []
    for _ in range(steps):
        planned = instance.plan_step(0.0)
        assert planned is not None
        said += [token for delta in instance.finish_step(planned).deltas for token in delta.token_ids]
    return said


def source_after(steps: int) -> tuple[SimulatedInstance, EngineRequest]:
    source = SimulatedInstance(CONFIG, LinearCost())
    source.submit(REQUEST)
    return source, replace(REQUEST, emitted_token_ids=tuple(step(source, steps)))


def test_a_moved_request_computes_one_token_and_says_the_rest() -> None:
    source, request = source_after(5)
    exported = source.export("a")
    assert (exported.computed_tokens, exported.tokens, len(exported.block_ids)) == (14, 15, 4)
    target = SimulatedInstance(CONFIG, LinearCost())
    wanted = target.admit_import(request, exported.computed_tokens)
    assert target.plan_step(0.0) is None
    for block, remote in zip(wanted.block_ids, exported.block_ids, strict=True):
        target.write_block(block, source.read_block(remote))
    target.complete_import("a")
    planned = target.plan_step(0.0)
    assert planned is not None
    assert [each.shape.new_tokens for each in planned.chunks] == [1]
    first = [token for delta in target.finish_step(planned).deltas for token in delta.token_ids]
    assert first + step(target, 14) == step(source, 15)
    assert target.load().kv_blocks_used == 0


def test_a_paused_request_goes_on_and_ends_once() -> None:
    source, _ = source_after(5)
    source.pause("a")
    assert source.plan_step(0.0) is None
    assert source.state_of("a") is SequenceState.PAUSED
    source.resume("a")
    undisturbed, _ = source_after(5)
    assert step(source, 15) == step(undisturbed, 15)
    assert source.request_ids == ()
    source.validate()


def test_a_partial_block_is_filled_up_to_its_tokens() -> None:
    source, _ = source_after(5)
    blocks = source.export("a").block_ids
    assert source.read_block(blocks[3])[128:] == bytes(128)
    assert source.read_block(blocks[3])[:128] != bytes(128)
    assert len({source.read_block(block) for block in blocks}) == len(blocks)


def test_a_torn_swapped_or_foreign_block_is_not_taken() -> None:
    source, request = source_after(5)
    target = SimulatedInstance(CONFIG, LinearCost())
    wanted = target.admit_import(request, 14)
    right = [source.read_block(block) for block in source.export("a").block_ids]
    stranger = SimulatedInstance(CONFIG, LinearCost())
    stranger.submit(replace(REQUEST, prompt_token_ids=(50, *REQUEST.prompt_token_ids[1:])))
    step(stranger, 5)
    # The second block's tokens are the same in both; what precedes them is not.
    foreign = stranger.read_block(stranger.export("a").block_ids[1])
    torn = right[1][:128] + bytes(128)
    for wrong in (torn, right[0], foreign, right[1][:-1], b""):
        with pytest.raises(KvBlockCorrupt):
            target.write_block(wanted.block_ids[1], wrong)
    with pytest.raises(IllegalTransition, match="not written"):
        target.complete_import("a")
    with pytest.raises(IllegalTransition, match="not written yet"):
        target.read_block(wanted.block_ids[1])
    target.write_block(wanted.block_ids[1], right[1])
    with pytest.raises(IllegalTransition, match="awaits no transfer"):
        target.write_block(wanted.block_ids[1], right[1])


def test_an_import_that_is_given_up_leaves_nothing_behind() -> None:
    _, request = source_after(5)
    target = SimulatedInstance(CONFIG, LinearCost())
    wanted = target.admit_import(request, 14)
    assert target.abort("a") is not None
    target.validate()
    assert target.load().kv_blocks_used == 0
    assert target.cached_hashes == (), "blocks that were never written must not be found as a prefix"
    with pytest.raises(IllegalTransition):
        target.write_block(wanted.block_ids[0], b"")


def test_only_blocks_that_are_not_cached_here_are_asked_for() -> None:
    source, request = source_after(5)
    target = SimulatedInstance(CONFIG, LinearCost())
    target.submit(replace(REQUEST, request_id="earlier"))
    step(target, 20)
    wanted = target.admit_import(request, 14)
    assert wanted.first_block == 3
    assert len(wanted.block_ids) == 1
    target.write_block(wanted.block_ids[0], source.read_block(source.export("a").block_ids[3]))
    target.complete_import("a")
    step(target, 15)
    assert target.request_ids == ()


def test_an_import_without_room_is_refused() -> None:
    target = SimulatedInstance(CONFIG, LinearCost())
    target.submit(CountedRequest("big", 70, 5))
    step(target, 2)
    with pytest.raises(RequestRefused, match="too few free"):
        target.admit_import(REQUEST, 9)
    with pytest.raises(RequestRefused, match="at least the last one"):
        target.admit_import(REQUEST, 10)
    target.validate()


def test_a_cached_block_can_be_read_after_its_request() -> None:
    source, _ = source_after(5)
    block = source.export("a").block_ids[0]
    before = source.read_block(block)
    source.abort("a")
    assert source.read_block(block) == before
    with pytest.raises(IllegalTransition):
        source.read_block(19)


def prefix_of(request: EngineRequest, name: str) -> EngineRequest:
    return replace(request, request_id=name)


LONG = EngineRequest("long", tuple(3 + index % 90 for index in range(30)), replace(SAMPLING, max_tokens=2))


def has_computed(request: EngineRequest) -> SimulatedInstance:
    instance = SimulatedInstance(CONFIG, LinearCost())
    instance.submit(request)
    step(instance, request.sampling.max_tokens)
    return instance


def test_a_held_prefix_enters_another_prefix_cache_and_is_hit_there() -> None:
    source, target = has_computed(LONG), SimulatedInstance(CONFIG, LinearCost())
    held = source.hold_prefix(prefix_of(LONG, "hold"), 99)
    assert len(held) == source.cached_blocks(LONG) == 7
    assert source.load().kv_blocks_used == 7
    wanted = target.admit_carrier(prefix_of(LONG, "pull"), len(held))
    assert (wanted.first_block, len(wanted.block_ids)) == (0, 7)
    for block, remote in zip(wanted.block_ids, held, strict=True):
        target.write_block(block, source.read_block(remote))
    target.store_carried("pull")
    assert target.load().kv_blocks_used == 0
    target.submit(LONG)
    planned = target.plan_step(0.0)
    assert planned is not None
    assert [each.shape.new_tokens for each in planned.chunks] == [2]
    result = target.finish_step(planned)
    assert result.deltas[0].cached_tokens == 28
    assert len(result.kv_blocks.stored) == 7
    assert [*result.deltas[0].token_ids, *step(target, 1)] == step(has_computed_before(), 2)
    for instance in (source, target):
        instance.abort("hold")
        assert instance.load().kv_blocks_used == 0
        instance.validate()


def has_computed_before() -> SimulatedInstance:
    instance = SimulatedInstance(CONFIG, LinearCost())
    instance.submit(LONG)
    return instance


def test_what_is_held_is_not_evicted_and_what_is_not_is_not_held() -> None:
    source = has_computed(LONG)
    held = source.hold_prefix(prefix_of(LONG, "hold"), 3)
    assert len(held) == 3
    source.submit(EngineRequest("other", tuple(range(20, 88)), SAMPLING))
    step(source, 2)
    source.validate()
    assert source.cached_blocks(LONG) == 3, "the rest was evicted"
    assert [len(source.read_block(block)) for block in held] == [256] * 3
    source.abort("hold")
    source.validate()


def test_no_more_than_half_of_the_free_blocks_is_held() -> None:
    source = has_computed(LONG)
    source.submit(EngineRequest("other", tuple(range(20, 60)), SAMPLING))
    step(source, 1)
    free = CONFIG.kv_blocks - source.load().kv_blocks_used
    cached = source.cached_blocks(LONG)
    held = source.hold_prefix(prefix_of(LONG, "hold"), 99)
    assert len(held) == min(cached, free // 2)
    assert len(held) < cached
    source.validate()


def test_a_carrier_brings_what_lacks_and_leaves_nothing_if_it_is_given_up() -> None:
    source, target = has_computed(LONG), has_computed(replace(LONG, prompt_token_ids=LONG.prompt_token_ids[:14]))
    held = source.hold_prefix(prefix_of(LONG, "hold"), 99)
    wanted = target.admit_carrier(prefix_of(LONG, "pull"), len(held))
    assert (wanted.first_block, len(wanted.block_ids)) == (3, 4)
    target.write_block(wanted.block_ids[0], source.read_block(held[3]))
    with pytest.raises(IllegalTransition, match="cannot be stored"):
        target.store_carried("pull")
    target.abort("pull")
    target.validate()
    assert target.cached_blocks(LONG) == 3
    assert target.load().kv_blocks_used == 0


def test_a_carrier_without_room_is_refused() -> None:
    target = SimulatedInstance(CONFIG, LinearCost())
    target.submit(EngineRequest("other", tuple(range(20, 80)), replace(SAMPLING, max_tokens=5)))
    step(target, 1)
    with pytest.raises(RequestRefused, match="5 are free"):
        target.admit_carrier(prefix_of(LONG, "pull"), 7)
    target.validate()
