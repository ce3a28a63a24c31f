"""A run of steps equals the same steps one by one, to the last bit."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.instance import LoadReport
from controlplane.model.request import EngineRequest, SamplingParams
from simulator.cost.linear import LinearCost
from simulator.cost.model import BatchShape, CostModel
from simulator.instance.config import InstanceConfig, OutputConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import Instance

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
    arrivals: list[tuple[float, EngineRequest | CountedRequest]], cost: CostModel, config: InstanceConfig, runs: bool
) -> Story:
    """The whole load, looked at whenever a request arrives."""
    instance = Instance(config, cost)
    story = Story()
    cached: set[int] = set()
    now_ms, waiting = 0.0, sorted(arrivals, key=lambda arrival: arrival[0])
    while True:
        while waiting and waiting[0][0] <= now_ms:
            instance.submit(waiting.pop(0)[1])
            story.loads.append(instance.load())
            story.cached.append(frozenset(cached))
        horizon_ms = waiting[0][0] if waiting else 1e12
        step = instance.plan_step(now_ms, horizon_ms) if runs else instance.plan_step(now_ms)
        if step is None:
            if not waiting:
                break
            now_ms = waiting[0][0]
            continue
        story.plans += 1
        assert story.plans < 10_000
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


@settings(max_examples=150, deadline=None)
@given(
    shapes=shapes,
    with_ids=st.booleans(),
    cost=st.sampled_from([LinearCost(), LongestSequenceCost()]),
    kv_blocks=st.integers(30, 90),
)
def test_runs_equal_single_steps(
    shapes: list[tuple[float, int, int, int, int]], with_ids: bool, cost: CostModel, kv_blocks: int
) -> None:
    make = told if with_ids else counted
    arrivals = [(at_ms, make(index, *shape)) for index, (at_ms, *shape) in enumerate(shapes)]
    config = replace(CONFIG, kv_blocks=kv_blocks)
    single = play(arrivals, cost, config, runs=False)
    fast = play(arrivals, cost, config, runs=True)
    assert len(single.finished) == len(shapes)
    assert fast.plans <= single.plans
    fast.plans = single.plans
    assert fast == single


def test_a_lone_decode_is_planned_in_one_run() -> None:
    story = play([(0.0, CountedRequest("a", 10, 80))], LinearCost(), CONFIG, runs=True)
    assert story.plans == 2
    assert story.loads[-1].generated_tokens_total == 80


def test_a_run_s_last_step_starts_before_the_horizon() -> None:
    instance = Instance(CONFIG, LinearCost(fixed_ms=10.0))
    instance.submit(CountedRequest("a", 10, 80))
    first = instance.plan_step(0.0)
    assert first is not None
    instance.finish_step(first)
    run = instance.plan_step(0.0, horizon_ms=100.0)
    assert run is not None
    assert run.ends_ms >= 100.0
    assert run.ends_ms - run.last_step_ms < 100.0


def test_a_run_does_not_pass_a_look() -> None:
    instance = Instance(CONFIG, LinearCost(fixed_ms=10.0))
    instance.submit(CountedRequest("a", 10, 80))
    first = instance.plan_step(0.0)
    assert first is not None
    instance.finish_step(first)
    run = instance.plan_step(0.0, horizon_ms=200.0, look_ms=100.0)
    assert run is not None
    assert run.steps > 1
    assert 100.0 - run.last_step_ms < run.ends_ms <= 100.0
    instance.finish_step(run)
    seen = instance.load()
    straddling = instance.plan_step(run.ends_ms, horizon_ms=200.0, look_ms=100.0)
    assert straddling is not None
    assert straddling.steps == 1
    assert instance.load().running_tokens == seen.running_tokens
