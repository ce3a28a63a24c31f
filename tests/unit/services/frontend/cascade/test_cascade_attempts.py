"""What cascades measure, count and tell of every tier that they ask."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.protocols.cascade.expected_time import DOUBT_AFTER_S
from penstock.v1 import request_pb2
from services.frontend.cascade.latency_estimates import TierLatencyEstimates
from tests.unit.services.frontend.cascade_of_fakes import RECORD, USER, Cascade, cascade, saying
from tests.unit.services.frontend.fakes import failure

pytestmark = pytest.mark.live

REFUSED = failure(request_pb2.ERROR_CODE_REFUSED, "no room")
SURE = msgspec.structs.replace(RECORD, judges=("confidence",))


def hinted(latency_s: float) -> dict[str, Any]:
    return {"extra_body": {"penstock": {"latency_s": latency_s}}}


def prompt_tokens(both: Cascade) -> int:
    return len(both.mesh.ids(f"<s><|user|>{USER[0]['content']}<|assistant|>"))


# -- times


def times_of(both: Cascade) -> TierLatencyEstimates:
    return both.mesh.cascades.latencies


@pytest.mark.slow
async def test_one_slow_answer_does_not_lock_its_tier_out(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0) as both:
        now_s = both.mesh.service.clock()
        both.mesh.service.clock = lambda: now_s
        times_of(both).answer_latency("large").took(60.0, now_s)
        assert (await both.ask(**hinted(10))).parse().penstock["because"] == "deadline"
        now_s += DOUBT_AFTER_S
        for _ in range(3):
            assert (await both.ask(**hinted(10))).parse().penstock["tier"] == "large"


@pytest.mark.slow
async def test_a_tier_that_was_cut_is_known_to_take_longer(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0, large_step_s=5.0) as both:
        large = both.mesh.workers[1]
        assert (await both.ask(**hinted(2))).parse().penstock["because"] == "deadline"
        assert times_of(both).answer_latency("large").median_s(both.mesh.service.clock()) > 0.5
        assert (await both.ask(**hinted(0.5))).parse().penstock["because"] == "deadline"
        assert len(large.received) == 1


async def test_whole_answers_are_measured_whoever_accepts_them_and_judgements_apart(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 90.0) as both:
        await both.ask(extra_body={"penstock": {"max_tier": "small"}})
        now_s = both.mesh.service.clock()
        small, judgement = times_of(both).answer_latency("small"), times_of(both).judge_latency("both")
        assert small.median_s(now_s) > 0
        assert judgement.median_s(now_s) == 0
        await both.ask()
        assert judgement.median_s(both.mesh.service.clock()) > 0


async def test_an_answer_that_was_given_up_is_not_taken_for_a_short_one(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 50.0, SURE) as both:
        both.mesh.worker.script = saying(both.mesh, "Hm. " * 50)
        await both.ask()
        assert both.mesh.metric("cascade_tier_seconds_count", cascade="both", tier="small") == 0
        assert both.mesh.metric("cascade_tier_seconds_count", cascade="both", tier="large") == 1
        small = times_of(both).answer_latency("small")
        small.took(60.0, both.mesh.service.clock())
        assert small.median_s(both.mesh.service.clock()) == 60.0


# -- attempts


async def test_a_tier_that_was_cut_at_the_deadline_is_told_of_and_counted(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0, large_step_s=0.15) as both:
        both.mesh.workers[1].script = saying(both.mesh, "Hm. " * 50)
        answer = (await both.ask(**hinted(2))).parse()
        assert (answer.penstock["tier"], answer.penstock["because"]) == ("small", "deadline")
        small, large = answer.penstock["tiers"]
        assert (small["cut"], large["cut"]) == (False, True)
        assert (large["model"], large["score"], large["failure"]) == ("large", None, None)
        assert 0 < large["seconds"] <= answer.penstock["seconds"]
        assert large["completion_tokens"] > 0
        assert answer.usage.prompt_tokens == 2 * prompt_tokens(both)
        assert answer.usage.completion_tokens == small["completion_tokens"] + large["completion_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tier_that_is_asked_again_is_counted_twice(model_path: Path, stream: bool) -> None:
    async with cascade(model_path, lambda _: 10.0, SURE) as both:
        both.mesh.worker.script = saying(both.mesh, "Hm. " * 20)
        both.mesh.workers[1].script = lambda _: [REFUSED]
        body = {"model": "both", "messages": USER}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with both.mesh.http() as http:
            text = (await http.post("/v1/chat/completions", json=body)).text
        last = text.split("data: ")[-2] if stream else text
        told = msgspec.json.decode(last)
        first, failed, again = told["penstock"]["tiers"]
        assert [tier["model"] for tier in (first, failed, again)] == ["small", "large", "small"]
        assert (first["given_up"], again["given_up"]) == (True, False)
        assert first["judge"] == "confidence"
        assert (again["judge"], again["score"]) == (None, None), "nobody judged it"
        assert "no room" in failed["failure"]
        assert (failed["prompt_tokens"], failed["completion_tokens"]) == (0, 0), "it did nothing"
        assert told["usage"]["prompt_tokens"] == 2 * prompt_tokens(both)
        assert told["usage"]["completion_tokens"] == first["completion_tokens"] + again["completion_tokens"]
        assert again["completion_tokens"] > first["completion_tokens"] > 0


async def test_what_a_tier_had_written_when_it_failed_counts(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0) as both:
        whole = saying(both.mesh, "Hm. " * 20)
        both.mesh.worker.script = lambda request: [*list(whole(request))[:5], REFUSED]
        answer = (await both.ask()).parse()
        small, large = answer.penstock["tiers"]
        assert small["completion_tokens"] == 5
        assert small["seconds"] is None
        assert answer.usage.completion_tokens == 5 + large["completion_tokens"]
        assert answer.usage.prompt_tokens == 2 * prompt_tokens(both)


# -- what judges are told


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("judged", [False, True])
async def test_a_prompt_of_token_ids_is_judged_and_sampled_as_its_text(
    model_path: Path, nested: bool, judged: bool
) -> None:
    record = RECORD if judged else msgspec.structs.replace(RECORD, thresholds=(0.0,))
    async with cascade(model_path, lambda _: 90.0, record) as both:
        ids = [*both.mesh.ids("<s>"), *both.mesh.ids("Say something.")]
        prompt: Any = [ids] if nested else ids
        await both.mesh.client().completions.create(model="both", prompt=prompt)
        await both.mesh.until(lambda: len(both.router.judged) == 1)
        (told,) = both.router.judged
        assert (told.prompt, told.sample_only) == ("Say something.", not judged)
        assert msgspec.json.decode(told.request_json)["prompt"] == prompt
        await both.mesh.client().completions.create(model="both", prompt=["Say something else."])
        await both.mesh.until(lambda: len(both.router.judged) == 2)
        assert both.router.judged[1].prompt == "Say something else."
