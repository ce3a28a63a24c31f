"""The account of the engine's load."""

from engine_worker.engines.vllm.load import LoadAccount, StepStats


def stats(running: int, prefilled: int = 0, usage: float = 0.0, preemptions: int = 0) -> StepStats:
    return StepStats(running, usage, prefilled, running, preemptions)


def submit(load: LoadAccount, request_id: str, tokens: int, cached: int = 0, priority: int = 0) -> None:
    load.submitted(request_id, tokens, cached, priority, now_s=0.0)


def test_a_request_s_life() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "a", 50)
    waiting = load.report()
    assert (waiting.running_requests, waiting.queued_requests) == (0, 1)
    assert (waiting.queued_prefill_tokens, waiting.running_tokens) == (50, 0)

    load.stepped(stats(1, prefilled=30, usage=0.02), now_s=0.5)
    prefilling = load.report()
    assert (prefilling.running_requests, prefilling.queued_requests) == (1, 0)
    assert (prefilling.queued_prefill_tokens, prefilling.running_tokens) == (20, 50)
    assert prefilling.kv_blocks_used == 2
    assert prefilling.step_ms == 500.0

    load.stepped(stats(1, prefilled=20, usage=0.04), now_s=0.75)
    load.produced("a", 1)
    decoding = load.report()
    assert (decoding.queued_prefill_tokens, decoding.running_tokens) == (0, 51)
    assert decoding.step_ms == 250.0

    load.stepped(StepStats(0, 0.0, prefilled_tokens=0, decoded_tokens=1, preemptions=0), now_s=0.8)
    load.produced("a", 1)
    load.ended("a")
    done = load.report()
    assert (done.running_requests, done.queued_requests, done.running_tokens, done.kv_blocks_used) == (0, 0, 0, 0)
    assert (done.generated_tokens_total, done.prefilled_tokens_total, done.finished_requests_total) == (2, 50, 1)


def test_a_request_that_goes_on_elsewhere_has_not_finished() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "moves", 50)
    load.stepped(stats(1, prefilled=50), now_s=0.1)
    load.produced("moves", 1)
    load.left("moves")
    gone = load.report()
    assert (gone.running_requests, gone.queued_requests, gone.running_tokens) == (0, 0, 0)
    assert (gone.generated_tokens_total, gone.finished_requests_total) == (1, 0)


def test_what_is_cached_is_not_queued() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "a", 50, cached=32)
    assert load.report().queued_prefill_tokens == 18


def test_the_first_token_corrects_a_wrong_guess() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "a", 50)
    submit(load, "b", 10)
    load.stepped(stats(1, prefilled=18), now_s=0.1)
    load.produced("a", 1)
    assert load.report().queued_prefill_tokens == 10


def test_prefill_is_credited_in_the_scheduler_s_order() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "started", 100, priority=9)
    load.stepped(stats(1, prefilled=10), now_s=0.1)
    submit(load, "late", 40, priority=1)
    submit(load, "urgent", 40, priority=0)
    load.stepped(stats(2, prefilled=100), now_s=0.2)
    # 90 for the one under way, 10 for the urgent one: aborting the late one takes all of its tokens away.
    load.ended("late")
    assert load.report().queued_prefill_tokens == 30
    assert load.report().running_tokens == 100 + 40


def test_an_abort_of_the_last_request_leaves_nothing_behind() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "a", 50)
    load.stepped(stats(1, prefilled=50, usage=0.5), now_s=0.1)
    load.ended("a")
    report = load.report()
    assert (report.running_requests, report.queued_requests, report.kv_blocks_used) == (0, 0, 0)


def test_idle_time_is_no_step_time() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "a", 5)
    load.stepped(stats(0, prefilled=5), now_s=1.0)
    load.ended("a")
    load.submitted("b", 5, 0, 0, now_s=60.0)
    load.stepped(stats(1, prefilled=5), now_s=60.25)
    assert load.report().step_ms == 250.0


def test_preemptions_add_up() -> None:
    load = LoadAccount(kv_blocks=100)
    load.stepped(stats(1, preemptions=2), now_s=0.1)
    load.stepped(stats(1, preemptions=1), now_s=0.2)
    assert load.report().preemptions_total == 3


def test_a_step_that_only_cleans_up_has_no_duration() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "a", 5)
    load.stepped(stats(1, prefilled=5), now_s=0.5)
    load.stepped(stats(0), now_s=0.6)
    assert load.report().step_ms == 500.0


def test_decoding_requests_and_the_time_between_their_tokens() -> None:
    load = LoadAccount(kv_blocks=100)
    submit(load, "a", 50)
    submit(load, "b", 50)
    load.stepped(stats(2, prefilled=50), now_s=1.0)
    load.produced("a", 1)
    assert (load.report().decoding_requests, load.report().token_interval_ms) == (1, 0.0)
    load.stepped(stats(2, prefilled=50), now_s=1.2)
    load.produced("a", 1)
    load.produced("b", 1)
    load.stepped(stats(2), now_s=1.3)
    load.produced("a", 1)
    load.produced("b", 1)
    assert load.report().decoding_requests == 2
    assert round(load.report().token_interval_ms, 3) == round((200 + 100 + 100) / 3, 3)
    load.ended("a")
    load.ended("b")
    assert (load.report().decoding_requests, load.report().token_interval_ms) == (0, 0.0)
