"""Which requests are sampled, and what comes of them."""

import asyncio
import math
import random
from collections import Counter
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from controlplane.model.cascade_record import CascadeRecord
from controlplane.planning.cascade.drift import MIN_REQUESTS
from controlplane.planning.cascade.workload import read_window, read_workload
from controlplane.protocols.cascade.confidence import confidence_of
from mesh.errors import JudgeUnavailable, NoInstance, PeerUnavailable
from mesh.runtime import SystemEntropy
from penstock.v1 import cascade_pb2
from services.cascade.judges.chain import JudgeChain
from services.cascade.judges.confidence import ConfidenceJudge
from services.cascade.judges.interface import JudgedAnswer, Judgement
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.planner_link import report_of
from services.cascade.sampling.sampler import SampledWorkload, WorkloadSampler, label_of
from services.cascade.sampling.samplers import Samplers, SamplingSettings
from services.cascade.sampling.tiers import LOWEST_PRIORITY, SampledAnswer, SampledRequest, TierClient
from services.cascade.sampling.window import SampleWindow

pytestmark = pytest.mark.live

RECORD = CascadeRecord("both", ("small", "medium", "large"), (50.0, 50.0), judges=("first", "second"))


@given(size=st.integers(1, 20), offered=st.integers(0, 100), seed=st.integers(0, 1000))
def test_a_window_keeps_a_sample_of_its_size_and_counts_all(size: int, offered: int, seed: int) -> None:
    window: SampleWindow[int] = SampleWindow(size, 10.0, random.Random(seed))
    for item in range(offered):
        window.offer(item)
    window.count()
    closed = window.close(20.0)
    assert len(closed.items) == min(size, offered)
    assert len(set(closed.items)) == len(closed.items)
    assert (closed.offered, closed.seconds) == (offered + 1, 10.0)
    assert window.close(30.0).items == ()


@pytest.mark.parametrize("only_counted", [0, 3])
def test_each_item_has_the_same_chance(only_counted: int) -> None:
    kept: Counter[int] = Counter()
    for seed in range(2000):
        window: SampleWindow[int] = SampleWindow(5, 0.0, random.Random(seed))
        for item in range(20):
            window.offer(item)
            for _ in range(only_counted):
                window.count()
        kept.update(window.close(1.0).items)
    assert all(400 < count < 600 for count in kept.values()), "a quarter of 2000 each"


class FakeTiers:
    """Tiers that answer with as many tokens as their name has letters, if they have an instance; one prompt breaks the
    large one."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.logprobs: tuple[float, ...] = ()
        self.drained: set[str] = set()

    async def answer(self, sampled: SampledRequest, model: str) -> SampledAnswer:
        self.asked.append((model, sampled.prompt))
        if sampled.prompt == "hangs":
            await asyncio.Event().wait()
        if model in self.drained:
            raise NoInstance("drained")
        if model == "large" and sampled.prompt == "broken":
            raise PeerUnavailable("gone")
        answer = JudgedAnswer(sampled.prompt, "answer", model, self.logprobs)
        return SampledAnswer(answer, sampled.input_tokens, len(model))


class FakeJudge:
    def __init__(self, name: str, scores: dict[str, float]) -> None:
        self.name, self._scores = name, scores

    async def score(self, judged: JudgedAnswer) -> float:
        if judged.prompt not in self._scores:
            raise JudgeUnavailable("no idea")
        return self._scores[judged.prompt]

    async def close(self) -> None:
        pass


def judged(prompt: str, *, tier: str = "small", body: bytes = b'{"messages": []}') -> cascade_pb2.JudgeRequest:
    return cascade_pb2.JudgeRequest(
        prompt=prompt,
        tier=tier,
        chat=True,
        request_json=body,
        prompt_tokens=7,
        completion_tokens=3,
        first_answer=True,
    )


class Sampling:
    def __init__(self, requests: int = 10, window_s: float = 60.0) -> None:
        self.now_s = 0.0
        self.news = asyncio.Event()
        self.tiers = FakeTiers()
        self.reported: list[SampledWorkload] = []
        client: Any = self.tiers
        self.registry = CollectorRegistry()
        self.samplers = Samplers(
            SamplingSettings(window_s, requests),
            client,
            self._report,
            lambda: self.now_s,
            SystemEntropy(),
            CascadeMetrics(self.registry),
        )
        self.chain = JudgeChain(
            [FakeJudge("first", {"good": 90.0, "broken": 90.0}), FakeJudge("second", {"odd": 10.0})], 5.0, lambda: 0.0
        )
        self.samplers.begin(RECORD, self.chain)

    async def _report(self, workload: SampledWorkload) -> None:
        self.reported.append(workload)
        self.news.set()

    def offer(self, request: cascade_pb2.JudgeRequest, score: float = 40.0, judge: str = "first") -> None:
        self.samplers.offer(RECORD, request, Judgement(score, judge))

    def samples(self, outcome: str) -> float | None:
        labels = {"cascade": "both", "outcome": outcome}
        return self.registry.get_sample_value("penstock_cascade_samples_total", labels)

    async def close(self, after_s: float = 10.0) -> None:
        self.now_s += after_s
        for sampler in self.samplers._samplers.values():
            await sampler.close_window(self.now_s)


async def test_a_cascade_whose_tiers_hang_keeps_no_other_from_being_sampled() -> None:
    sampling = Sampling(window_s=0.001)
    other = msgspec.structs.replace(RECORD, name="other")
    sampling.samplers.begin(other, sampling.chain)
    sampling.offer(judged("hangs"))
    running = asyncio.create_task(sampling.samplers.run())
    try:
        async with asyncio.timeout(5.0):
            while len(sampling.reported) < 3:
                sampling.news.clear()
                await sampling.news.wait()
    finally:
        running.cancel()
        await asyncio.wait((running,))
    assert {workload.record.name for workload in sampling.reported} == {"other"}
    assert sampling.tiers.asked == [("medium", "hangs")], "its window is closed once"


async def test_a_window_that_is_lost_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, close, failures = Sampling(window_s=0.001), WorkloadSampler.close_window, [RuntimeError("a bug")]

    async def fails_once(sampler: WorkloadSampler, now_s: float) -> None:
        if failures:
            raise failures.pop()
        await close(sampler, now_s)

    monkeypatch.setattr(WorkloadSampler, "close_window", fails_once)
    running = asyncio.create_task(sampling.samplers.run())
    try:
        await asyncio.wait_for(sampling.news.wait(), 5.0)
    finally:
        running.cancel()
        await asyncio.wait((running,))
    assert not failures


async def test_a_sample_is_answered_and_scored_on_every_tier() -> None:
    sampling = Sampling()
    sampling.offer(judged("good"))
    await sampling.close()
    (workload,) = sampling.reported
    (request,) = workload.requests
    assert request.input_tokens == 7
    assert request.output_tokens == (3, len("medium"), len("large"))
    assert request.scores == (40.0, 90.0, 90.0)
    assert (workload.rate_per_s, workload.judge) == (pytest.approx(0.1), "first")


async def test_an_answer_that_was_given_up_is_asked_for_again_and_score_bounds_are_reported() -> None:
    sampling = Sampling()
    record = msgspec.structs.replace(RECORD, name="sure", tiers=("small", "large"), judges=("confidence",))
    sampling.samplers.begin(record, JudgeChain([ConfidenceJudge()], 5.0, lambda: 0.0))
    sampling.tiers.logprobs = (0.0, -4.0, 0.0, 0.0, 0.0)
    whole, given_up = judged("whole"), judged("given up")
    whole.token_logprobs.extend([0.0, 0.0, -2.0])
    given_up.token_logprobs.extend([0.0, -3.0, -5.0, -4.0])
    given_up.given_up = True
    for request in (whole, given_up):
        score = confidence_of(request.token_logprobs).score
        sampling.samplers.offer(record, request, Judgement(score, "confidence"))
    await sampling.close()
    (workload,) = (each for each in sampling.reported if each.record == record)
    first, second = sorted(workload.requests, key=lambda request: request.output_tokens)
    assert first.output_tokens == (3, len("large"))
    assert second.output_tokens == (len("small"), len("large"))
    at_four = (4, pytest.approx(100 * math.exp(-1)))
    assert first.score_bounds == (((3, pytest.approx(100 * math.exp(-2 / 3))),), (at_four,))
    assert second.score_bounds == ((at_four,), (at_four,))
    models, sample = read_workload(report_of(workload, "cascade-0").lines)
    assert (models, sample.score_bounds is None) == (record.tiers, False)


async def test_samples_that_a_tier_or_the_first_judge_fails_are_left_out_and_counted() -> None:
    sampling = Sampling()
    for prompt in ("good", "broken", "odd", "unknown"):
        sampling.offer(judged(prompt))
    await sampling.close()
    (workload,) = sampling.reported
    assert len(workload.requests) == 1
    assert (sampling.samples("kept"), sampling.samples("dropped")) == (1, 3)


@pytest.mark.parametrize("drained", [{"small"}, {"large"}, {"medium", "large"}, {"small", "medium", "large"}])
async def test_a_tier_without_instances_is_missing_and_the_workload_is_reported_with_the_others(
    drained: set[str],
) -> None:
    sampling = Sampling()
    sampling.tiers.drained = drained
    for _ in range(3):
        sampling.offer(judged("good", tier="small"))
    await sampling.close()
    (workload,) = sampling.reported
    expected = (40.0, *(None if tier in drained else 90.0 for tier in ("medium", "large")))
    assert [request.scores for request in workload.requests] == [expected] * 3, "small has answered the client"
    assert (sampling.samples("incomplete"), sampling.samples("dropped")) == (3 * bool(drained - {"small"}), 0)
    report = report_of(workload, "cascade-0")
    assert read_window(report.lines).requests == workload.requests
    assert (report.router, report.window_s, report.offered, report.judge) == ("cascade-0", 10.0, 3, "first")


async def test_score_bounds_of_a_tier_without_instances_are_missing_too() -> None:
    sampling = Sampling()
    record = msgspec.structs.replace(RECORD, name="sure", tiers=("small", "large"), judges=("confidence",))
    sampling.samplers.begin(record, JudgeChain([ConfidenceJudge()], 5.0, lambda: 0.0))
    sampling.tiers.logprobs, sampling.tiers.drained = (0.0, -4.0), {"small"}
    request = judged("whole", tier="large")
    request.token_logprobs.extend([0.0, 0.0, -2.0])
    score = confidence_of(request.token_logprobs).score
    sampling.samplers.offer(record, request, Judgement(score, "confidence"))
    await sampling.close()
    (workload,) = (each for each in sampling.reported if each.record == record)
    (sample,) = workload.requests
    assert (sample.scores, sample.output_tokens) == ((None, score), (None, 3))
    assert sample.score_bounds is not None
    assert sample.score_bounds[0] is None
    assert read_window(report_of(workload, "").lines).requests == (sample,)


async def test_windows_without_requests_and_without_samples_are_reported() -> None:
    sampling = Sampling()
    await sampling.close()
    sampling.offer(judged("good", body=b""))
    await sampling.close()
    reports = [report_of(workload, "cascade-0") for workload in sampling.reported]
    assert [(report.offered, report.window_s) for report in reports] == [(0, 10.0), (1, 10.0)]
    assert [read_window(report.lines).rate_per_s for report in reports] == [0.0, 0.1]


@pytest.mark.parametrize(("requests", "is_too_few"), [(0, False), (MIN_REQUESTS - 1, True), (MIN_REQUESTS, False)])
def test_samples_too_small_to_plan_for_are_warned_of_at_the_start(
    requests: int, is_too_few: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Sampling(requests)
    assert ("too few to plan for" in caplog.text) == is_too_few


async def test_requests_are_counted_once_and_only_those_that_the_first_judge_scored_are_taken() -> None:
    sampling = Sampling()
    again = judged("good", tier="medium")
    again.first_answer = False
    sampling.offer(again)
    sampling.offer(judged("good"), judge="second")
    await sampling.close()
    assert [(len(workload.requests), workload.offered) for workload in sampling.reported] == [(0, 1)]
    sampling.reported.clear()
    sampling.offer(judged("good"))
    sampling.offer(again)
    sampling.offer(judged("good", body=b""))
    sampling.offer(judged("good"), judge="second")
    sampling.samplers.offer(RECORD, judged("good"), None)  # nobody had a score for it
    await sampling.close()
    assert sampling.reported[0].rate_per_s == pytest.approx(0.4), "the others are counted, not kept"
    assert len(sampling.reported[0].requests) == 1


async def test_where_the_first_tier_is_not_asked_it_answers_the_samples() -> None:
    sampling = Sampling()
    sampling.offer(judged("good", tier="medium"))
    await sampling.close()
    ((request,),) = [workload.requests for workload in sampling.reported]
    assert request.scores == (90.0, 40.0, 90.0)
    assert [model for model, _ in sampling.tiers.asked] == ["small", "large"]


async def test_an_answer_that_is_not_judged_is_answered_by_every_tier_as_a_sample() -> None:
    sampling = Sampling()
    unjudged = cascade_pb2.JudgeRequest(
        prompt="good",
        tier="large",
        chat=True,
        request_json=b'{"messages": []}',
        prompt_tokens=7,
        sample_only=True,
        first_answer=True,
    )
    sampling.samplers.offer(RECORD, unjudged, None)
    await sampling.close()
    ((request,),) = [workload.requests for workload in sampling.reported]
    assert (request.scores, request.output_tokens) == ((90.0, 90.0, 90.0), (5, 6, 5))
    assert [model for model, _ in sampling.tiers.asked] == ["small", "medium", "large"]


async def test_other_thresholds_do_not_end_the_window_but_other_judges_do() -> None:
    sampling = Sampling()
    sampling.offer(judged("good"))
    sampling.samplers.begin(msgspec.structs.replace(RECORD, thresholds=(0.0, 9.0), plan_revision=7), sampling.chain)
    sampling.offer(judged("good"))
    await sampling.close()
    sampling.offer(judged("good"))
    sampling.samplers.begin(RECORD, JudgeChain([FakeJudge("first", {})], 5.0, lambda: 0.0))
    await sampling.close()
    assert [workload.offered for workload in sampling.reported] == [2, 0]


async def test_sampling_can_be_switched_off_and_ends_with_the_cascade() -> None:
    off = Sampling(requests=0)
    off.offer(judged("good"))
    await off.close()
    assert off.tiers.asked == []
    sampling = Sampling()
    sampling.samplers.end("both")
    sampling.offer(judged("good"))
    await sampling.close()
    assert sampling.tiers.asked == []


async def test_a_tier_is_asked_behind_every_client_and_without_what_a_sample_needs_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = TierClient(lambda: "http://frontend/v1", 5.0)
    sent: list[tuple[str, dict[str, Any]]] = []

    async def post(url: str, json: dict[str, Any]) -> httpx.Response:
        sent.append((url, json))
        answer = {
            "choices": [
                {"message": {"content": "hi"}, "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -3.0}]}}
            ],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        }
        return httpx.Response(200, json=answer)

    monkeypatch.setattr(client._client, "post", post)
    request = {
        "messages": [],
        "model": "both",
        "stream": True,
        "penstock": {"quality": 9},
        "temperature": 0.5,
        "seed": None,
    }
    sampled = SampledRequest(request, True, "prompt", 5)
    answer = await client.answer(sampled, "large")
    assert answer == SampledAnswer(JudgedAnswer("prompt", "hi", "large", (-1.0, -3.0)), 5, 2)
    assert sent == [
        (
            "http://frontend/v1/chat/completions",
            {"messages": [], "model": "large", "temperature": 0.5, "priority": LOWEST_PRIORITY, "logprobs": True},
        )
    ]
    await client.close()


@pytest.mark.parametrize(("status", "code"), [(503, "no_instance"), (404, "model_not_found")])
async def test_a_tier_that_nobody_serves_has_no_instance(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    client = TierClient(lambda: "http://frontend/v1", 5.0)

    async def post(url: str, json: dict[str, Any]) -> httpx.Response:
        return httpx.Response(status, json={"error": {"message": "none", "type": "server_error", "code": code}})

    monkeypatch.setattr(client._client, "post", post)
    with pytest.raises(NoInstance, match="large has no instance"):
        await client.answer(SampledRequest({}, False, "p", 1), "large")
    await client.close()


@pytest.mark.parametrize(
    ("response", "words"),
    [(httpx.Response(503, text="busy"), "answers 503"), (httpx.Response(200, text="{}"), "no answer that can be read")],
)
async def test_a_tier_that_gives_no_answer_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, response: httpx.Response, words: str
) -> None:
    client = TierClient(lambda: "http://frontend/v1", 5.0)

    async def post(url: str, json: dict[str, Any]) -> httpx.Response:
        return response

    monkeypatch.setattr(client._client, "post", post)
    with pytest.raises(PeerUnavailable, match=words):
        await client.answer(SampledRequest({}, False, "p", 1), "large")
    await client.close()
    nobody = TierClient(lambda: "", 5.0)
    with pytest.raises(PeerUnavailable, match="no frontend"):
        await nobody.answer(SampledRequest({}, False, "p", 1), "large")
    await nobody.close()


async def test_answers_are_labelled_by_another_judge_and_reported_with_whose_labels_these_are() -> None:
    sampling = Sampling()
    record = msgspec.structs.replace(RECORD, name="labelled", label="third")

    class Reader(FakeJudge):
        async def score(self, judged: JudgedAnswer) -> float:
            if judged.tier == "large":
                raise JudgeUnavailable("no idea")
            return 100.0 if judged.answer == "the client's" else 20.0

    labels = JudgeChain([Reader("third", {})], 5.0, lambda: 0.0)
    sampling.samplers.begin(record, sampling.chain, labels)
    request = judged("good")
    request.answer, request.request_id = "the client's", "r1"
    sampling.samplers.offer(record, request, Judgement(40.0, "first"))
    await sampling.close()
    (workload,) = (each for each in sampling.reported if each.record == record)
    window = read_window(report_of(workload, "cascade-0").lines)
    assert (window.judge, window.label) == ("first", "third")
    (sample,) = window.requests
    assert (sample.quality, sample.request_id) == ((100.0, 20.0, None), "r1")
    counted = [
        sampling.registry.get_sample_value(
            "penstock_cascade_labels_total", {"cascade": "labelled", "label": "third", "outcome": outcome}
        )
        for outcome in ("given", "missing")
    ]
    assert counted == [2, 1]


def test_an_exact_check_labels_right_or_wrong() -> None:
    labels = [label_of(Judgement(score, judge)) for judge in ("exact", "model:x") for score in (100.0, 90.0)]
    assert labels == [100.0, 0.0, 100.0, 90.0]
