"""Who computes what, when memory runs out and whose blocks live longest."""

from dataclasses import replace
from typing import Any

import pytest

from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, FinishReason, SamplingParams
from mesh.errors import ConfigurationError, IllegalTransition, RequestRefused
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig, OutputConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance
from simulator.instance.step import Step, StepResult

CONFIG = InstanceConfig(
    block_tokens=4, kv_blocks=100, max_model_len_tokens=200, max_batch_requests=4, max_step_tokens=16
)


def take(instance: SimulatedInstance) -> tuple[Step, StepResult]:
    step = instance.plan_step(0.0)
    assert step is not None
    instance.validate()
    result = instance.finish_step(step)
    instance.validate()
    return step, result


def run_out(instance: SimulatedInstance) -> list[StepResult]:
    """Step until every request has ended."""
    results: list[StepResult] = []
    while instance.request_ids:
        results.append(take(instance)[1])
        assert len(results) < 1000
    return results


def chunks(step: Step) -> list[tuple[str, int, int]]:
    return [(each.request_id, each.shape.new_tokens, each.shape.context_tokens) for each in step.chunks]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    instance = SimulatedInstance(CONFIG, LinearCost())
    instance.submit(CountedRequest("short", 3, 50))
    take(instance)
    instance.submit(CountedRequest("long", 40, 5))
    seen = [take(instance)[0] for _ in range(4)]
    assert [chunks(step) for step in seen] == [[("long", 15, 0)], [("long", 15, 15)], [("long", 10, 30)], []]
    assert [step.decode_requests for step in seen] == [1, 1, 1, 2]


def test_the_rest_of_the_budget_goes_to_the_next_in_line() -> None:
    instance = SimulatedInstance(CONFIG, LinearCost())
    for name, tokens in (("a", 6), ("b", 20), ("c", 3)):
        instance.submit(CountedRequest(name, tokens, 50))
    assert chunks(take(instance)[0]) == [("a", 6, 0), ("b", 10, 0)]
    assert chunks(take(instance)[0]) == [("b", 10, 10), ("c", 3, 0)]


def test_lower_priority_numbers_are_admitted_first() -> None:
    instance = SimulatedInstance(replace(CONFIG, max_batch_requests=1), LinearCost())
    for name, priority in (("second", 1), ("third", 1), ("first", 0)):
        instance.submit(CountedRequest(name, 3, 1, priority=priority))
    assert [take(instance)[1].finished for _ in range(3)] == [("first",), ("second",), ("third",)]


def test_the_last_to_arrive_is_preempted_and_resumes_where_it_was() -> None:
    instance = SimulatedInstance(replace(CONFIG, kv_blocks=8, max_model_len_tokens=32), LinearCost())
    instance.submit(CountedRequest("old", 12, 15))
    instance.submit(CountedRequest("young", 4, 16))
    results = run_out(instance)
    assert [name for result in results for name in result.preempted] == ["young"]
    assert [name for result in results for name in result.finished] == ["old", "young"]
    load = instance.load()
    assert load.generated_tokens_total == 15 + 16
    assert load.preemptions_total == 1
    assert load.prefilled_tokens_total > 12 + 4


def test_a_preempted_request_of_which_only_lengths_are_known_finds_its_own_blocks_again() -> None:
    # 10 blocks of 4: the young one has 4 full ones when it is preempted, of which the old one takes the last.
    instance = SimulatedInstance(replace(CONFIG, kv_blocks=10, max_model_len_tokens=40), LinearCost())
    instance.submit(CountedRequest("old", 14, 12))
    instance.submit(CountedRequest("young", 14, 12))
    steps: list[Step] = []
    while instance.request_ids:
        steps.append(take(instance)[0])
    (resumed,) = [chunk for step in steps[3:] for chunk in chunks(step)]
    assert resumed[0] == "young"
    assert resumed[2] == 12, "blocks that nobody else took are not computed again"
    assert instance.load().preemptions_total == 1


def test_the_less_important_is_preempted_even_if_it_came_first() -> None:
    instance = SimulatedInstance(replace(CONFIG, kv_blocks=8, max_model_len_tokens=32), LinearCost())
    instance.submit(CountedRequest("background", 12, 15, priority=5))
    instance.submit(CountedRequest("urgent", 4, 16))
    assert {name for result in run_out(instance) for name in result.preempted} == {"background"}


def test_a_prefix_outlives_what_follows_it() -> None:
    instance = SimulatedInstance(replace(CONFIG, kv_blocks=10, max_model_len_tokens=40), LinearCost())
    instance.submit(CountedRequest("a", 16, 1, block_hashes=(1, 2, 3, 4)))
    take(instance)
    # Six blocks were never used; this takes them and evicts two of the four, from the tail.
    instance.submit(CountedRequest("b", 32, 1))
    evicted = take(instance)[1].kv_blocks.removed + take(instance)[1].kv_blocks.removed
    assert evicted == (4, 3)
    instance.submit(CountedRequest("c", 16, 1, block_hashes=(1, 2, 3, 4)))
    _, result = take(instance)
    assert result.started[0].cached_prompt_tokens == 8


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    instance = SimulatedInstance(replace(CONFIG, kv_blocks=5, max_model_len_tokens=20), LinearCost())
    for name, block_hash in (("a", 1), ("b", 2), ("a-again", 1)):
        instance.submit(CountedRequest(name, 5, 1, block_hashes=(block_hash,)))
        take(instance)
    instance.submit(CountedRequest("big", 16, 1))
    assert take(instance)[1].kv_blocks.removed == (2,)


def test_requests_of_one_step_share_blocks_already() -> None:
    instance = SimulatedInstance(CONFIG, LinearCost())
    for name in "ab":
        instance.submit(CountedRequest(name, 9, 3, block_hashes=(1, 2)))
    step, result = take(instance)
    assert chunks(step) == [("a", 9, 0), ("b", 1, 8)]
    assert [each.cached_prompt_tokens for each in result.started] == [0, 8]
    assert instance.load().kv_blocks_used == 4


def test_queued_prefill_tokens_leave_out_what_is_cached() -> None:
    instance = SimulatedInstance(CONFIG, LinearCost())
    instance.submit(CountedRequest("a", 9, 1, block_hashes=(1, 2)))
    take(instance)
    instance.submit(CountedRequest("b", 9, 1, block_hashes=(1, 2)))
    instance.submit(CountedRequest("c", 30, 1))
    assert instance.load().queued_prefill_tokens == 1 + 30
    take(instance)
    assert instance.load().queued_prefill_tokens == 15
    assert instance.load().running_tokens == 30


def test_a_request_that_decodes_lengthens_the_cached_chain() -> None:
    config = replace(CONFIG, output=OutputConfig(vocabulary_tokens=100, first_token_id=3, last_token_id=99))
    instance = SimulatedInstance(config, LinearCost())
    prompt = tuple(range(3, 9))
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    instance.submit(EngineRequest("a", prompt, sampling))
    results = run_out(instance)
    said = [token for result in results for delta in result.deltas for token in delta.token_ids]
    stored = [block_hash for result in results for block_hash in result.kv_blocks.stored]
    # The last token's KV is never computed.
    assert stored == block_hashes([*prompt, *said[:-1]], config.block_tokens)


def test_runs_stop_where_a_new_cached_block_lets_the_queue_move() -> None:
    """The head of the queue continues the very text that is being decoded, so each block of it helps it in."""
    config = replace(
        CONFIG,
        kv_blocks=14,
        max_model_len_tokens=56,
        output=OutputConfig(vocabulary_tokens=100, first_token_id=3, last_token_id=99),
    )
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    first = EngineRequest("first", tuple(range(3, 27)), sampling)

    def ends(horizon_ms: float) -> list[tuple[str, float]]:
        probe = SimulatedInstance(config, LinearCost())
        probe.submit(first)
        said = [token for result in run_out(probe) for delta in result.deltas for token in delta.token_ids]
        instance = SimulatedInstance(config, LinearCost())
        instance.submit(first)
        instance.submit(EngineRequest("second", (*first.prompt_token_ids, *said[:14]), replace(sampling, max_tokens=2)))
        now_ms, seen = 0.0, []
        for _ in range(1000):
            step = instance.plan_step(now_ms, horizon_ms)
            if step is None:
                break
            now_ms = step.ends_ms
            seen += [(name, now_ms) for name in instance.finish_step(step).finished]
        return seen

    one_by_one = ends(-1.0)
    assert [name for name, _ in one_by_one] == ["second", "first"]
    assert ends(1e9) == one_by_one


def test_an_aborted_request_frees_its_blocks_in_the_midst_of_a_step() -> None:
    instance = SimulatedInstance(CONFIG, LinearCost())
    instance.submit(CountedRequest("a", 9, 9))
    instance.submit(CountedRequest("b", 30, 9))
    step = instance.plan_step(0.0)
    assert step is not None
    for name in "ab":
        delta = instance.abort(name)
        assert delta is not None
        assert delta.finish_reason is FinishReason.ABORT
        instance.validate()
    assert instance.load().kv_blocks_used == 0
    assert instance.finish_step(step).emitted_tokens == 0
    assert instance.plan_step(0.0) is None


def test_steps_are_finished_once_and_in_order() -> None:
    instance = SimulatedInstance(CONFIG, LinearCost())
    instance.submit(CountedRequest("a", 9, 9))
    step = instance.plan_step(0.0)
    assert step is not None
    with pytest.raises(IllegalTransition, match="finish it before"):
        instance.plan_step(0.0)
    instance.finish_step(step)
    with pytest.raises(IllegalTransition, match="only once"):
        instance.finish_step(step)


@pytest.mark.parametrize(
    "request_",
    [
        CountedRequest("a", 0, 5),
        CountedRequest("a", 10, 0),
        CountedRequest("a", 200, 5),
        CountedRequest("a", 10, 5, emitted_tokens=5),
        EngineRequest("a", (1,), SamplingParams(max_tokens=5, min_tokens=6)),
        EngineRequest("a", (1,), SamplingParams(max_tokens=0)),
        EngineRequest("a", (1,), SamplingParams(max_tokens=5, temperature=-1.0)),
        EngineRequest("a", (1 << 70,), SamplingParams(max_tokens=5)),
    ],
)
def test_what_cannot_be_served_is_refused(request_: EngineRequest | CountedRequest) -> None:
    instance = SimulatedInstance(CONFIG, LinearCost())
    with pytest.raises(RequestRefused):
        instance.submit(request_)
    assert instance.request_ids == ()
    instance.validate()


@pytest.mark.parametrize(
    "change",
    [
        {"kv_blocks": 49},
        {"max_step_tokens": 3},
        {"block_tokens": 0},
        {"block_bytes": 1022},
        {"max_queued_requests": -1},
    ],
)
def test_settings_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        replace(CONFIG, **change)


def test_the_load_says_who_decodes_and_how_fast() -> None:
    instance = SimulatedInstance(CONFIG, LinearCost())
    instance.submit(CountedRequest("short", 3, 50))
    take(instance)
    assert (instance.load().decoding_requests, instance.load().token_interval_ms) == (1, 0.0)
    step, _ = take(instance)
    assert instance.load().token_interval_ms == pytest.approx(step.duration_ms, abs=1e-3)
    instance.submit(CountedRequest("long", 40, 5))
    slowed, _ = take(instance)
    assert instance.load().decoding_requests == 1
    mean_ms = (step.duration_ms + slowed.duration_ms) / 2
    assert instance.load().token_interval_ms == pytest.approx(mean_ms, abs=1e-3)
    run_out(instance)
    assert (instance.load().decoding_requests, instance.load().token_interval_ms) == (0, 0.0)
