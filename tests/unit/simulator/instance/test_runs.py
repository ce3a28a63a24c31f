"""A run of steps equals the same steps one by one, to the last bit."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, SamplingParams
from mesh.errors import IllegalTransition
from simulator.cost.linear import LinearCost
from simulator.cost.model import BatchShape, CostModel
from simulator.instance.block_pool import NO_CHANGES
from simulator.instance.config import InstanceConfig, OutputConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance
from simulator.instance.step import Step
from tests.examples import examples

CONFIG = InstanceConfig(
    block_tokens=4,
    kv_blocks=60,
    max_model_len_tokens=120,
    max_batch_requests=5,
    max_step_tokens=40,
    output=OutputConfig(vocabulary_tokens=50, first_token_id=3, last_token_id=49, median_tokens=30),
)


class LongestSequenceCost(CostModel):
    """Depends on each length in the batch, and leaves runs to the default of `CostModel`."""

    def step_ms(self, batch: BatchShape) -> float:
        longest = max(batch.decode_context_tokens, default=0)
        return 3.0 + 0.01 * float(longest) + 0.1 * sum(chunk.new_tokens for chunk in batch.prefill)


@dataclass
class Story:
    """All that can be seen of an instance from outside."""

    started: list[tuple[str, int, float]] = field(default_factory=list)
    finished: list[tuple[str, float]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    loads: list[LoadReport] = field(default_factory=list)
    cached: list[frozenset[int]] = field(default_factory=list)
    end_ms: float = 0.0
    plans: int = 0


def play(
    arrivals: list[tuple[float, EngineRequest | CountedRequest]],
    cost: CostModel,
    config: InstanceConfig,
    runs: bool,
    looks_ms: Sequence[float] = (),
    glances: bool = False,
) -> Story:
    """The whole load, looked at whenever a request arrives and at `looks_ms`, then with a glance where that does."""
    instance = SimulatedInstance(config, cost)
    story = Story()
    cached: set[int] = set()
    now_ms, waiting = 0.0, sorted(arrivals, key=lambda arrival: arrival[0])
    looks = sorted(looks_ms)

    def look(changes: KvBlocks) -> None:
        nonlocal cached
        cached = cached - set(changes.removed) | set(changes.stored)
        instance.validate()
        story.loads.append(instance.load())
        story.cached.append(frozenset(cached))

    while True:
        while waiting and waiting[0][0] <= now_ms:
            instance.submit(waiting.pop(0)[1])
            look(NO_CHANGES)
        step = instance.plan_step(now_ms, most_steps=500 if runs else 1)
        if step is None:
            if not waiting:
                break
            now_ms = waiting[0][0]
            continue
        story.plans += 1
        assert story.plans < 10_000
        while looks and looks[0] < min(step.ends_ms, waiting[0][0] if waiting else 1e12):
            at_ms = looks.pop(0)
            look(instance.settle(at_ms) if not glances or instance.glance(at_ms) is None else NO_CHANGES)
        if waiting and waiting[0][0] < step.ends_ms:
            changes = instance.settle(waiting[0][0])
            cached = cached - set(changes.removed) | set(changes.stored)
            instance.interrupt()
        step = instance.planned
        assert step is not None
        result = instance.finish_step(step)
        instance.validate()
        now_ms = step.ends_ms
        cached = cached - set(result.kv_blocks.removed) | set(result.kv_blocks.stored)
        story.started += [(each.request_id, each.cached_prompt_tokens, now_ms) for each in result.started]
        story.finished += [(request_id, now_ms) for request_id in result.finished]
        story.preempted += result.preempted
        for delta in result.deltas:
            story.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    story.loads.append(instance.load())
    story.cached.append(frozenset(cached))
    story.end_ms = now_ms
    return story


def told(index: int, prompt: int, output: int, shared: int, priority: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=index % 3 == 0)
    ids = [3 + shared] * prompt
    ids[-1] = 3 + index % 40
    return EngineRequest(f"r{index}", tuple(ids), sampling, priority=priority)


def counted(index: int, prompt: int, output: int, shared: int, priority: int) -> CountedRequest:
    hashes = tuple(1000 * (shared + 1) + block for block in range((prompt + output) // 4))
    return CountedRequest(f"r{index}", prompt, output, block_hashes=hashes if shared else (), priority=priority)


shapes = st.lists(
    st.tuples(st.floats(0, 400), st.integers(1, 60), st.integers(1, 60), st.integers(0, 3), st.integers(0, 1)),
    min_size=1,
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    shapes=shapes,
    with_ids=st.booleans(),
    cost=st.sampled_from([LinearCost(), LongestSequenceCost()]),
    kv_blocks=st.integers(30, 90),
    looks_ms=st.lists(st.floats(0, 600), max_size=20),
    glances=st.booleans(),
)
def test_runs_equal_single_steps(
    shapes: list[tuple[float, int, int, int, int]],
    with_ids: bool,
    cost: CostModel,
    kv_blocks: int,
    looks_ms: list[float],
    glances: bool,
) -> None:
    make = told if with_ids else counted
    arrivals = [(at_ms, make(index, *shape)) for index, (at_ms, *shape) in enumerate(shapes)]
    config = replace(CONFIG, kv_blocks=kv_blocks)
    single = play(arrivals, cost, config, runs=False, looks_ms=looks_ms)
    fast = play(arrivals, cost, config, runs=True, looks_ms=looks_ms, glances=glances)
    assert len(single.finished) == len(shapes)
    assert fast.plans <= single.plans
    fast.plans = single.plans
    assert fast == single


def test_a_lone_decode_is_planned_in_one_run() -> None:
    story = play([(0.0, CountedRequest("a", 10, 80))], LinearCost(), CONFIG, runs=True)
    assert story.plans == 2
    assert story.loads[-1].generated_tokens_total == 80


def lone_run(steps: int) -> tuple[SimulatedInstance, Step]:
    instance = SimulatedInstance(CONFIG, LinearCost(fixed_ms=10.0))
    instance.submit(CountedRequest("a", 10, 80))
    first = instance.plan_step(0.0)
    assert first is not None
    instance.finish_step(first)
    run = instance.plan_step(0.0, most_steps=steps)
    assert run is not None
    return instance, run


def test_a_run_is_as_long_as_asked_for_at_most() -> None:
    assert lone_run(7)[1].steps == 7
    assert lone_run(700)[1].steps == 79


def test_settling_counts_the_steps_that_are_over() -> None:
    instance, run = lone_run(50)
    tokens = instance.load().running_tokens
    instance.settle(100.0)
    left = run.steps_left
    assert 40 <= left < 50
    assert instance.load().running_tokens == tokens + 50 - left
    assert instance.load().kv_blocks_used == -(-(11 + 50 - left) // 4)
    instance.settle(100.0)
    assert run.steps_left == left
    instance.settle(1e9)
    assert run.steps_left == 1  # the last step is for finish_step


def test_a_glance_tells_of_steps_that_it_does_not_count() -> None:
    settled, glanced = (lone_run(50)[0] for _ in range(2))
    for now_ms, has_news in ((100.0, True), (100.0, False), (230.0, True), (480.0, True)):
        settled.settle(now_ms)
        assert glanced.glance(now_ms) is has_news
        assert glanced.load() == settled.load()
    glanced.settle(480.0)
    assert glanced.load() == settled.load()
    glanced.validate()


def test_where_blocks_are_evicted_a_glance_does_not_do() -> None:
    instance = SimulatedInstance(replace(CONFIG, kv_blocks=21, max_model_len_tokens=84), LinearCost(fixed_ms=10.0))
    for number, hashes in enumerate(((7, 8, 9), ())):
        prompt, output = (13, 1) if hashes else (33, 50)
        instance.submit(CountedRequest(f"r{number}", prompt, output, block_hashes=hashes))
        step = instance.plan_step(0.0)
        assert step is not None
        instance.finish_step(step)
    run = instance.plan_step(0.0, most_steps=50)
    assert run is not None
    assert instance.glance(200.0) is None
    assert instance.settle(1e9).removed, "the blocks of the prefix"


def test_an_interrupted_run_ends_with_the_step_under_way() -> None:
    instance, run = lone_run(50)
    instance.settle(100.0)
    left = instance.interrupt()
    assert left is not None
    assert (left.steps, left.decode_requests) == (1, run.decode_requests)
    assert left.started_ms <= 100.0 < left.ends_ms
    with pytest.raises(IllegalTransition):
        instance.finish_step(run)
    instance.finish_step(left)
    assert instance.planned is None
