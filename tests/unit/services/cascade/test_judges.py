"""Judges, one by one and in a row."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from demo.tasks import generate
from mesh.errors import ConfigurationError, JudgeUnavailable
from services.cascade.judges.chain import REST_S, JudgeChain
from services.cascade.judges.chat import ChatJudge
from services.cascade.judges.confidence import ConfidenceJudge
from services.cascade.judges.exact import ExactJudge
from services.cascade.judges.interface import JudgeContext, JudgedAnswer, Judgement
from services.cascade.judges.parse import make_judge

pytestmark = pytest.mark.live

ANSWER = JudgedAnswer("What is 2 + 2?", "4", "small", token_logprobs=(math.log(0.8), math.log(0.8)))


async def test_confidence_is_the_lowest_mean_probability_of_the_tokens_so_far() -> None:
    assert await ConfidenceJudge().score(ANSWER) == pytest.approx(80.0)
    sure, unsure = math.log(1.0), math.log(0.0001)
    recovers = JudgedAnswer("?", "4", "small", token_logprobs=(sure, sure, sure, unsure, *[sure] * 100))
    assert await ConfidenceJudge().score(recovers) == pytest.approx(10.0), "0.0001 ** (1 / 4)"
    with pytest.raises(JudgeUnavailable, match="log-probabilities"):
        await ConfidenceJudge().score(JudgedAnswer("?", "4", "small"))


async def test_the_exact_judge_knows_the_demo_tasks_and_nothing_else() -> None:
    task = generate(1, 1)[0]
    assert await ExactJudge().score(JudgedAnswer(task.prompt, task.answer, "small")) == 100.0
    assert await ExactJudge().score(JudgedAnswer(task.prompt, "no idea", "small")) < 100.0
    with pytest.raises(JudgeUnavailable, match="demo"):
        await ExactJudge().score(ANSWER)


@asynccontextmanager
async def endpoint(reply: Response | None = None) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """An OpenAI-compatible endpoint that says 7, surely; and what it was asked."""
    asked: list[dict[str, object]] = []
    top = [{"token": "7", "logprob": math.log(0.9), "bytes": None}, {"token": "8", "logprob": math.log(0.1)}]

    async def complete(request: Request) -> Response:
        asked.append({**msgspec.json.decode(await request.body()), "key": request.headers.get("authorization")})
        position = {"token": "7", "logprob": -0.1, "top_logprobs": top}
        return reply or JSONResponse({"choices": [{"message": {"content": "7"}, "logprobs": {"content": [position]}}]})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1", asked
    finally:
        server.should_exit = True
        await serving


async def test_a_model_is_asked_for_one_digit_and_scored_by_its_probabilities() -> None:
    async with endpoint() as (url, asked):
        judge = make_judge(f"endpoint:big@{url}/", JudgeContext(lambda: "", 5.0, api_key="secret"))
        assert await judge.score(ANSWER) == pytest.approx(100 * 7.1 / 9)
        await judge.close()
    (body,) = asked
    assert body["model"] == "big"
    assert body["max_tokens"] == 1
    assert body["key"] == "Bearer secret"
    assert "What is 2 + 2?" in str(body["messages"])


async def test_a_model_of_the_mesh_is_reached_through_a_frontend_with_the_meshs_key() -> None:
    async with endpoint() as (url, asked):
        judge = make_judge("model:large", JudgeContext(lambda: url, 5.0, api_key="external", mesh_key="own"))
        await judge.score(JudgedAnswer("p" * 200_000, "4", "small"))
        await judge.close()
    assert asked[0]["key"] == "Bearer own"
    assert len(str(asked[0]["messages"])) < 70_000, "what is too long is shortened in the middle"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (JSONResponse({"error": "busy"}, 429), "answers 429"),
        (JSONResponse({"choices": []}), "log-probabilities"),
        (JSONResponse({"choices": [{"logprobs": None}]}), "log-probabilities"),
        (Response(b"<html>"), "log-probabilities"),
    ],
)
async def test_replies_that_are_no_grade_are_no_score(reply: Response, words: str) -> None:
    async with endpoint(reply) as (url, _):
        judge = ChatJudge("endpoint:x", "x", lambda: url, 5.0)
        with pytest.raises(JudgeUnavailable, match=words):
            await judge.score(ANSWER)
        await judge.close()


async def test_a_judge_that_is_not_there_is_no_score() -> None:
    for url, words in (("http://127.0.0.1:9/v1", "127.0.0.1:9"), ("", "no frontend")):
        judge = ChatJudge("endpoint:x", "x", lambda url=url: url, 5.0)  # type: ignore[misc]
        with pytest.raises(JudgeUnavailable, match=words):
            await judge.score(ANSWER)
        await judge.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no judge ''; choose one of: confidence, exact, model, endpoint"),
        ("nobody", "choose one of: confidence, exact"),
        ("model:", "write model:NAME"),
        ("endpoint:x", "write endpoint:MODEL@URL"),
        ("endpoint:x@ftp://y", "write endpoint:MODEL@URL"),
        ("confidence:2", "write confidence"),
        ("model:x?draws=0", "draws is a number from 1 to 32"),
        ("model:x?think=much", "think is a number"),
        ("model:x?mood=good", "no option 'mood=good'"),
        ("model:x?rubric=12345678", "--rubric FILE"),
        ("model:?draws=2", "write model:NAME"),
        ("preference:exact", "write preference:model:NAME"),
        ("preference:endpoint:x", "write endpoint:MODEL@URL"),
    ],
)
def test_judges_that_there_are_not_are_refused_with_how_to_write_one(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make_judge(text, JudgeContext(lambda: "", 5.0))


class FakeJudge:
    def __init__(self, name: str, score: float | None = None, hangs: bool = False) -> None:
        self.name, self._score, self._hangs = name, score, hangs
        self.asked = 0

    async def score(self, judged: JudgedAnswer) -> float:
        self.asked += 1
        if self._hangs:
            await asyncio.Event().wait()
        if self._score is None:
            raise JudgeUnavailable("down")
        return self._score

    async def close(self) -> None:
        pass


async def test_the_next_judge_is_asked_where_one_is_down_and_it_is_said() -> None:
    chain = JudgeChain([FakeJudge("one"), FakeJudge("two", 55.0)], 5.0, lambda: 0.0)
    assert await chain.judge(ANSWER) == Judgement(55.0, "two", ("one: down",))


async def test_a_judge_that_hangs_costs_its_deadline_once() -> None:
    now_s = 0.0
    hanging, other = FakeJudge("one", 10.0, hangs=True), FakeJudge("two", 55.0)
    chain = JudgeChain([hanging, other], 0.01, lambda: now_s)
    for _ in range(3):
        assert (await chain.judge(ANSWER)).judge == "two"
    assert hanging.asked == 1
    now_s = REST_S
    await chain.judge(ANSWER)
    assert hanging.asked == 2


async def test_without_any_score_every_reason_is_given() -> None:
    with pytest.raises(JudgeUnavailable, match="one: down; two: down"):
        await JudgeChain([FakeJudge("one"), FakeJudge("two")], 5.0, lambda: 0.0).judge(ANSWER)


async def test_httpx_errors_name_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = ChatJudge("endpoint:x", "x", lambda: "http://host/v1", 5.0)

    async def broken(*_: object, **__: object) -> None:
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(judge._client, "post", broken)
    with pytest.raises(JudgeUnavailable, match="http://host/v1: ReadTimeout"):
        await judge.score(ANSWER)
    await judge.close()
