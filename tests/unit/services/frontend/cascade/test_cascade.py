"""Requests to a cascade, as the official client sees them."""

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from controlplane.protocols.cascade.confidence import FIRST_COUNTED_TOKEN
from penstock.v1 import cascade_pb2, request_pb2, scheduler_pb2
from services.frontend.cascade import judge_request, keep_alives
from tests.unit.services.frontend.cascade_of_fakes import RECORD, USER, Cascade, cascade, saying
from tests.unit.services.frontend.fakes import Script, by_model, failure

pytestmark = pytest.mark.live


async def test_an_answer_that_scores_enough_is_the_small_models(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 70.0) as both:
        response = await both.ask()
        answer = response.parse()
        assert answer.choices[0].message.content == "Hm."
        assert answer.model == "both"
        assert response.headers["x-penstock-tier"] == "small"
        assert response.headers["x-penstock-scores"] == "small=70.0"
        assert response.headers["x-penstock-accepted-because"] == "score"
        assert response.headers["x-penstock-instance"] == "worker-small"
        assert float(response.headers["x-penstock-seconds"]) > 0
        told = answer.penstock
        assert (told["tier"], told["because"], told["compromise"]) == ("small", "score", False)
        assert both.mesh.workers[1].received == []
        (judged,) = both.router.judged
        assert (judged.prompt, judged.answer, judged.tier, judged.cascade) == ("Say something.", "Hm.", "small", "both")
        assert msgspec.json.decode(judged.request_json)["messages"][0]["content"] == USER[0]["content"]


async def test_an_answer_that_scores_too_little_is_the_large_models_and_all_tokens_count(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 69.9) as both:
        response = await both.ask()
        answer = response.parse()
        assert answer.choices[0].message.content == "Something."
        assert response.headers["x-penstock-tier"] == "large"
        mesh = both.mesh
        prompt = len(mesh.ids("<s><|user|>Say something.<|assistant|>"))
        assert answer.usage.prompt_tokens == 2 * prompt
        assert answer.usage.completion_tokens == len(mesh.ids("Hm.")) + len(mesh.ids("Something.")) + 2
        assert [tier["model"] for tier in answer.penstock["tiers"]] == ["small", "large"]
        assert [tier["score"] for tier in answer.penstock["tiers"]] == [69.9, None]
        assert len(both.router.judged) == 1, "the last tier is not judged"
        assert [each.request_id for each in mesh.scheduler.placed] == [answer.id, f"{answer.id}-tier1"]
        assert mesh.metric("cascade_answers_total", cascade="both", tier="large", because="last_tier") == 1


async def test_a_streaming_client_gets_keep_alives_and_then_the_accepted_answer(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alives, "KEEP_ALIVE_S", 0.02)
    async with cascade(model_path, lambda _: 70.0) as both:
        both.mesh.worker.step_s = 0.05
        body = {"model": "both", "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
        async with both.mesh.http() as http:
            text = (await http.post("/v1/chat/completions", json=body)).text
        assert ": small is answering" in text
        events = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        said = [e["choices"][0]["delta"].get("content") for e in events if e["choices"]]
        assert said == ["", "Hm."], "at once: it might not have been accepted"
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert all(event["penstock"]["tier"] == "small" for event in events)
        assert events[-1]["usage"]["completion_tokens"] > 0
        assert text.endswith("data: [DONE]\n\n")
        stream = await both.mesh.client().chat.completions.create(model="both", messages=USER, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hm."


@pytest.mark.slow
async def test_confidence_needs_no_question_to_the_client_for_logprobs(model_path: Path) -> None:
    record = msgspec.structs.replace(RECORD, judges=("confidence",))
    async with cascade(model_path, lambda _: 90.0, record) as both:
        answer = (await both.ask()).parse()
        assert answer.choices[0].logprobs is None
        assert both.router.judged[0].token_logprobs[0] == pytest.approx(math.log(0.5))
        said = len(both.mesh.ids("Hm."))
        assert len(both.router.judged[0].token_logprobs) == said, "how sure it was of its end says nothing"
        with_logprobs = (await both.ask(logprobs=True)).parse()
        assert with_logprobs.choices[0].logprobs is not None
        assert len(with_logprobs.choices[0].logprobs.content or ()) == said + 1
        assert len(both.router.judged[1].token_logprobs) == said
    async with cascade(model_path, lambda _: 90.0) as both:
        await both.ask()
        assert not both.router.judged[0].token_logprobs
        assert not both.mesh.workers[0].received[0].sampling.HasField("logprobs")


SURE = msgspec.structs.replace(RECORD, judges=("confidence",))


async def test_an_answer_that_cannot_score_enough_any_more_is_given_up(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 50.0, SURE) as both:
        mesh, (small, large) = both.mesh, both.mesh.workers
        small.script = saying(mesh, "Hm. " * 50)
        small.step_s = 0.005
        answer = (await both.ask()).parse()
        assert answer.choices[0].message.content == "Something."
        first, second = answer.penstock["tiers"]
        assert (first["given_up"], second["given_up"]) == (True, False)
        assert first["score"] == pytest.approx(50.0)
        assert FIRST_COUNTED_TOKEN <= first["completion_tokens"] < 50
        await small.wait_until(lambda: small.aborted == [answer.id])
        assert mesh.metric("cascade_escalations_total", cascade="both", tier="large", because="given_up") == 1
        await mesh.until(lambda: len(both.router.judged) == 1)
        assert both.router.judged[0].given_up
        assert len(large.received) == 1


@pytest.mark.slow
async def test_with_another_judge_or_a_deadline_answers_are_written_to_their_end(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0) as both:
        judged_by_another = (await both.ask(logprobs=True)).parse()
        assert not judged_by_another.penstock["tiers"][0]["given_up"]
    async with cascade(model_path, lambda _: 10.0, SURE) as both:
        hurried = (await both.ask(extra_body={"penstock": {"latency_s": 60}})).parse()
        assert not hurried.penstock["tiers"][0]["given_up"]
        assert hurried.penstock["tier"] == "large"


async def test_an_answer_that_was_given_up_is_asked_for_again_if_no_other_comes(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0, SURE) as both:
        both.mesh.workers[0].script = saying(both.mesh, "Hm. " * 20)
        both.mesh.workers[1].script = lambda _: [failure(request_pb2.ERROR_CODE_REFUSED, "no room")]
        answer = (await both.ask()).parse()
        assert answer.choices[0].message.content == "Hm. " * 20
        assert (answer.penstock["tier"], answer.penstock["because"]) == ("small", "tier_failed")
        ids = [request.request_id for request in both.mesh.workers[0].received]
        assert ids == [answer.id, f"{answer.id}-again"]


@pytest.mark.slow
@pytest.mark.parametrize(("without", "tier"), [("escalate", "large"), ("accept", "small")])
async def test_without_a_judge_the_cascade_does_as_configured_and_says_so(
    model_path: Path, without: Any, tier: str
) -> None:
    record = msgspec.structs.replace(RECORD, without_judge=without)
    async with cascade(model_path, lambda _: None, record) as both:
        answer = (await both.ask()).parse()
        assert answer.penstock["tier"] == tier
        assert "fake: down" in answer.penstock["tiers"][0]["judge"]
        assert both.mesh.metric("cascade_unjudged_total", cascade="both") == 1
        both.mesh.directory.leave(both.router.member)
        again = (await both.ask()).parse()
        assert "no cascade router" in again.penstock["tiers"][0]["judge"]


@pytest.mark.slow
async def test_hints_raise_the_bar_cap_the_tier_and_bound_the_time(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 75.0, large_step_s=0.2) as both:
        raised = (await both.ask(extra_body={"penstock": {"quality": 80}})).parse()
        assert raised.penstock["tier"] == "large"
        capped = (await both.ask(extra_body={"penstock": {"quality": 80, "max_tier": "small"}})).parse()
        assert (capped.penstock["tier"], capped.penstock["because"]) == ("small", "last_tier")
        # The large model has taken over a second, so it is not begun.
        hurried = (await both.ask(extra_body={"penstock": {"quality": 80, "latency_s": 0.5}})).parse()
        assert (hurried.penstock["tier"], hurried.penstock["because"]) == ("small", "deadline")
        assert hurried.penstock["compromise"]


async def test_a_further_tier_that_takes_too_long_is_cut_and_the_best_so_far_given(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0, large_step_s=5.0) as both:
        answer = (await both.ask(extra_body={"penstock": {"latency_s": 2}})).parse()
        assert (answer.penstock["tier"], answer.penstock["because"]) == ("small", "deadline")
        large = both.mesh.workers[1]
        await large.wait_until(lambda: large.aborted == [f"{answer.id}-tier1"])


async def told_of(both: Cascade, requests: int) -> list[cascade_pb2.JudgeRequest]:
    """What the router got, once it has so much."""
    await both.mesh.until(lambda: len(both.router.judged) >= requests)
    return both.router.judged


async def test_an_answer_that_any_score_would_do_for_is_not_judged_but_counted(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = msgspec.structs.replace(RECORD, thresholds=(0.0,), judges=("confidence",))
    async with cascade(model_path, lambda _: None, record) as both:
        answer = (await both.ask()).parse()
        assert (answer.penstock["tier"], answer.penstock["because"]) == ("small", "accepts_all")
        assert not answer.penstock["compromise"]
        assert answer.penstock["tiers"][0]["judge"] is None
        assert not both.mesh.workers[0].received[0].sampling.HasField("logprobs")
        (told,) = await told_of(both, 1)
        assert (told.sample_only, told.first_answer, told.answer, told.tier) == (True, True, "", "small")
        assert (told.prompt, told.prompt_tokens) == ("Say something.", answer.usage.prompt_tokens)
        assert msgspec.json.decode(told.request_json)["messages"][0]["content"] == USER[0]["content"]
        assert both.mesh.cascades.latencies.answer_latency("small").median_s(both.mesh.service.clock()) > 0
        monkeypatch.setattr(judge_request, "MAX_SAMPLED_BYTES", 10)
        await both.ask()
        told = (await told_of(both, 2))[1]
        assert (told.first_answer, told.request_json, told.prompt) == (True, b"", "")
        both.mesh.directory.leave(both.router.member)
        await both.ask()
        await both.mesh.until(lambda: both.mesh.metric("cascade_untold_total", cascade="both") == 1)


async def test_the_first_tier_that_is_asked_has_the_clients_request_id_and_its_answer_counts_the_request(
    model_path: Path,
) -> None:
    record = msgspec.structs.replace(RECORD, tiers=("absent", "small", "large"), thresholds=(100.5, 70.0))
    async with cascade(model_path, lambda _: 10.0, record) as both:
        answer = (await both.ask()).parse()
        assert [tier["model"] for tier in answer.penstock["tiers"]] == ["small", "large"]
        assert [each.request_id for each in both.mesh.scheduler.placed] == [answer.id, f"{answer.id}-tier2"]
        (judged,) = await told_of(both, 1)
        assert (judged.tier, judged.first_answer, judged.sample_only) == ("small", True, False)
        capped = (await both.ask(extra_body={"penstock": {"max_tier": "small"}})).parse()
        assert capped.penstock["because"] == "last_tier"
        assert [(each.first_answer, each.sample_only) for each in await told_of(both, 2)][1:] == [(True, True)]


async def test_a_request_is_counted_once_however_many_answers_are_judged(model_path: Path) -> None:
    record = msgspec.structs.replace(RECORD, tiers=("small", "large", "absent"), thresholds=(70.0, 5.0))
    async with cascade(model_path, lambda _: 10.0, record) as both:
        await both.ask()
        first, second = await told_of(both, 2)
        assert (first.first_answer, second.first_answer) == (True, False)
        assert (bool(first.request_json), bool(second.request_json)) == (True, False)
        both.mesh.workers[0].script = lambda _: [failure(request_pb2.ERROR_CODE_REFUSED, "no room")]
        await both.ask()
        third = (await told_of(both, 3))[2]
        assert (third.tier, third.first_answer) == ("large", True), "no answer was before it"


@pytest.mark.parametrize(("ends", "status", "code"), [("stop", 503, "stopped"), ("deadline", 504, "deadline_exceeded")])
async def test_what_ends_a_request_on_one_tier_is_not_tried_on_the_next(
    model_path: Path, ends: str, status: int, code: str
) -> None:
    deadline_s = 2.0 if ends == "deadline" else 600.0
    async with cascade(model_path, lambda _: 10.0, request_deadline_s=deadline_s) as both, both.mesh.http() as http:
        small, large = both.mesh.workers
        small.script, small.step_s = saying(both.mesh, "Hm. " * 500), 0.02
        asked = asyncio.create_task(http.post("/v1/chat/completions", json={"model": "both", "messages": USER}))
        await small.wait_until(lambda: len(small.received) == 1)
        if ends == "stop":
            await both.mesh.role.stop()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert large.received == []


async def test_a_request_whose_time_is_over_gets_the_best_answer_so_far(model_path: Path) -> None:
    record = msgspec.structs.replace(RECORD, tiers=("small", "large", "absent"), thresholds=(70.0, 70.0))
    async with cascade(model_path, lambda _: 10.0, record, large_step_s=5.0, request_deadline_s=2.0) as both:
        answer = (await both.ask()).parse()
        assert (answer.penstock["tier"], answer.penstock["because"]) == ("small", "deadline")
        assert [tier["model"] for tier in answer.penstock["tiers"]] == ["small", "large"]


async def test_no_judge_is_waited_for_when_the_requests_time_is_over(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0, request_deadline_s=2.0) as both:
        both.router.waits = asyncio.Event()
        answer = (await asyncio.wait_for(both.ask(), 10.0)).parse()
        assert (answer.penstock["tier"], answer.penstock["because"]) == ("small", "deadline")


async def test_a_tier_that_fails_is_passed_over(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 90.0) as both:
        refusal = failure(request_pb2.ERROR_CODE_REFUSED, "no room")
        both.mesh.workers[0].script = lambda _: [refusal]
        answer = (await both.ask()).parse()
        assert answer.choices[0].message.content == "Something."
        assert "no room" in answer.penstock["tiers"][0]["failure"]
        both.mesh.workers[1].script = lambda _: [refusal]
        (told,) = await told_of(both, 1)
        assert (told.tier, told.first_answer, told.sample_only) == ("large", True, True)
        with pytest.raises(openai.APIStatusError, match="no room"):
            await both.ask()
        assert len(both.router.judged) == 1, "what nobody answered is not counted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"extra_body": {"kv_transfer_params": {"prompt_token_ids": [5]}}}, "kv_transfer_params.prompt_token_ids"),
        ({"extra_body": {"penstock": {"max_tier": "huge"}}}, "penstock.max_tier"),
        ({"extra_body": {"penstock": {"quality": 101}}}, "penstock.quality"),
        ({"extra_body": {"penstock": {"speed": 1}}}, "penstock.speed"),
        ({"model": "small", "extra_body": {"penstock": {"quality": 50}}}, "penstock"),
    ],
)
async def test_what_a_cascade_cannot_do_is_refused_by_name(
    model_path: Path, options: dict[str, Any], param: str
) -> None:
    async with cascade(model_path, lambda _: 90.0) as both:
        with pytest.raises(openai.BadRequestError) as refused:
            await both.ask(**options)
        assert param in (refused.value.param or "") or f"`{param}`" in str(refused.value)
        assert both.router.judged == []


async def test_completions_go_through_cascades_too(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0) as both:
        answer = await both.mesh.client().completions.create(model="both", prompt="Say", echo=True)
        assert answer.choices[0].text == "SaySomething."
        with pytest.raises(openai.BadRequestError, match="one prompt"):
            await both.mesh.client().completions.create(model="both", prompt=["a", "b"])


@pytest.mark.slow
async def test_cascades_are_listed_among_the_models_while_their_tiers_are_served(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0) as both:
        listed = {model.id: model for model in (await both.mesh.client().models.list()).data}
        assert listed["both"].penstock["tiers"] == ["small", "large"]  # type: ignore[attr-defined]
        assert (await both.mesh.client().models.retrieve("both")).id == "both"
        await both.mesh.store.delete(RECORD.key)
        await both.mesh.until(lambda: not both.mesh.cascades.records)
        with pytest.raises(openai.NotFoundError):
            await both.ask()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("thresholds", "is_listed"), [((70.0, 0.0), True), ((100.5, 0.0), True), ((70.0, 70.0), False)]
)
async def test_a_tier_that_no_request_reaches_need_not_be_served(
    model_path: Path, thresholds: tuple[float, ...], is_listed: bool
) -> None:
    record = msgspec.structs.replace(RECORD, tiers=("small", "large", "absent"), thresholds=thresholds)
    async with cascade(model_path, lambda _: 10.0, record) as both:
        assert ("both" in [model.id for model in (await both.mesh.client().models.list()).data]) == is_listed


async def test_a_client_that_leaves_takes_its_tier_along(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0, large_step_s=5.0) as both:
        asking = asyncio.create_task(both.ask())
        large = both.mesh.workers[1]
        await large.wait_until(lambda: len(large.received) == 1)
        asking.cancel()
        await large.wait_until(lambda: len(large.aborted) == 1)
        await both.mesh.until(lambda: not both.mesh.service.running)


async def test_thresholds_change_at_once_for_requests_to_come(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 75.0) as both:
        assert (await both.ask()).parse().penstock["tier"] == "small"
        raised = msgspec.structs.replace(RECORD, thresholds=(80.0,))
        await both.mesh.store.put(raised.key, msgspec.json.encode(raised))
        await both.mesh.until(lambda: both.mesh.cascades.records["both"].thresholds == (80.0,))
        assert (await both.ask()).parse().penstock["tier"] == "large"


def test_by_model_places_by_model() -> None:
    placed = by_model({"m": "i"})(scheduler_pb2.PlaceRequest(model="m"))
    assert placed.instance_id == "i"


async def test_a_clients_time_counts_from_arrival_and_each_tiers_from_its_being_asked(model_path: Path) -> None:
    async with cascade(model_path, lambda _: None) as both:
        mesh = both.mesh
        began_s = now_s = mesh.service.clock()

        def passing(seconds: float, script: Script) -> Script:
            def passes(request: request_pb2.GenerateRequest) -> Any:
                nonlocal now_s
                now_s += seconds
                return script(request)

            return passes

        def judge(_: cascade_pb2.JudgeRequest) -> float:
            nonlocal now_s
            now_s += 4.0
            return 10.0

        mesh.service.clock = lambda: now_s
        mesh.workers[0].script = passing(2.0, mesh.workers[0].script)
        mesh.workers[1].script = passing(16.0, mesh.workers[1].script)
        both.router.score = judge
        answer = (await both.ask()).parse()
        assert answer.penstock["tier"] == "large"
        assert now_s - began_s == pytest.approx(22.0)
        assert mesh.metric("ttft_seconds_sum", model="both") == pytest.approx(22.0), "both tiers and the judge"
        assert mesh.metric("ttft_seconds_count", model="both") == 1
        for tier, seconds in (("small", 2.0), ("large", 16.0)):
            assert mesh.metric("ttft_seconds_count", model=tier) == 0, "no client asked for it"
            assert mesh.metric("cascade_tier_ttft_seconds_sum", cascade="both", tier=tier) == pytest.approx(seconds)
            assert mesh.metric("cascade_tier_seconds_sum", cascade="both", tier=tier) == pytest.approx(seconds)
        await mesh.until(lambda: mesh.metric("e2e_seconds_count", model="both") == 1)
        assert mesh.metric("e2e_seconds_sum", model="both") == pytest.approx(22.0)
        await mesh.client().chat.completions.create(model="small", messages=USER)
        assert mesh.metric("ttft_seconds_sum", model="small") == pytest.approx(2.0), "asked for by its own name"


@pytest.mark.slow
async def test_escalations_are_counted_by_the_tier_gone_on_to_and_the_reason(model_path: Path) -> None:
    scores = iter([10.0, None])
    async with cascade(model_path, lambda _: next(scores)) as both:
        await both.ask()
        await both.ask()
        both.mesh.workers[0].script = lambda _: [failure(request_pb2.ERROR_CODE_REFUSED, "no room")]
        await both.ask()
        for because in ("low_score", "not_judged", "tier_failed"):
            labels = {"cascade": "both", "tier": "large", "because": because}
            assert both.mesh.metric("cascade_escalations_total", **labels) == 1
        assert both.mesh.metric("cascade_answers_total", cascade="both", tier="large", because="last_tier") == 3


async def test_a_tier_without_an_instance_is_not_waited_for_while_another_one_has_one(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 70.0) as both:
        mesh = both.mesh
        mesh.directory.leave(mesh.workers[0].member(str(model_path)))
        place = mesh.scheduler.choose

        def without_small(request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse | None:
            if request.model == "small":
                return scheduler_pb2.PlaceResponse(outcome=scheduler_pb2.PLACE_OUTCOME_NO_INSTANCE)
            return place(request)

        mesh.scheduler.choose = without_small
        async with asyncio.timeout(5):
            answer = (await both.ask()).parse()
        assert answer.choices[0].message.content == "Something."


async def test_a_tier_is_waited_for_where_no_other_may_be_asked(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 70.0) as both:
        mesh, small = both.mesh, both.mesh.workers[0].member(str(model_path))
        mesh.directory.leave(small)
        place = mesh.scheduler.choose
        is_back = False

        def without_small(request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse | None:
            if request.model == "small" and not is_back:
                return scheduler_pb2.PlaceResponse(outcome=scheduler_pb2.PLACE_OUTCOME_NO_INSTANCE)
            return place(request)

        mesh.scheduler.choose = without_small
        asking = asyncio.create_task(both.ask(extra_body={"penstock": {"max_tier": "small"}}))
        await mesh.until(lambda: len(mesh.service.room) == 1)
        is_back = True
        mesh.directory.join(small)
        async with asyncio.timeout(5):
            answer = (await asking).parse()
        assert answer.penstock["tier"] == "small"
