"""Judges that are models: what a verdict is worth, and judges that think, give no log-probabilities, compare two
answers or follow an operator's rubric."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mesh.errors import ConfigurationError, JudgeUnavailable
from services.cascade.judges.chat import grading
from services.cascade.judges.interface import Judge, JudgeContext, JudgedAnswer
from services.cascade.judges.parse import compares, make_judge, with_rubric
from services.cascade.judges.verdict import expected_value, rubric_digest, said_value

ANSWER = JudgedAnswer("What is 2 + 2?", "4", "small")
GRADES = grading(ANSWER, "")[0].values


def test_a_grade_is_the_mean_over_what_the_judge_might_have_said() -> None:
    assert expected_value({"9": 0.0}, GRADES) == pytest.approx(1.0)
    assert expected_value({"6": math.log(0.5), " 7": math.log(0.5)}, GRADES) == pytest.approx(6.5 / 9)
    assert expected_value({"8": math.log(0.6), "Well": math.log(0.1)}, GRADES) == pytest.approx(8 / 9)


@pytest.mark.parametrize("logprobs", [{}, {"I": 0.0}, {"10": 0.0}, {"5": math.log(0.1), "Sure": math.log(0.8)}])
def test_what_is_no_grade_is_no_score(logprobs: dict[str, float]) -> None:
    with pytest.raises(JudgeUnavailable, match="grade"):
        expected_value(logprobs, GRADES)


@given(st.dictionaries(st.sampled_from([*"0123456789", "a", " 3", "▁4", ""]), st.floats(-30, 5), max_size=20))
def test_any_reply_is_a_score_or_refused(logprobs: dict[str, float]) -> None:
    with suppress(JudgeUnavailable):
        assert 0 <= expected_value(logprobs, GRADES) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("7", 7),
        (" Grade: 7/9", 7),
        ("**7**", 7),
        ("<think>maybe 3, or 4?</think>\n\n8", 8),
        ("maybe 3, or 4?</think>8", 8),
        ("10", None),
        ("7.5", None),
        ("x7", None),
        ("<think>I would say 3", None),
        ("", None),
    ],
)
def test_a_grade_is_found_in_what_a_model_says_and_not_in_what_it_thinks(text: str, grade: int | None) -> None:
    if grade is None:
        with pytest.raises(JudgeUnavailable, match="grade"):
            said_value(text, GRADES)
    else:
        assert said_value(text, GRADES) == grade / 9


Reply = Callable[[dict[str, Any]], dict[str, Any]]


def asked_of(text: str, reply: Reply, rubric: str = "") -> tuple[Judge, list[dict[str, Any]]]:
    """The judge, whose model replies with these choices; and what the model is asked."""
    bodies: list[dict[str, Any]] = []

    async def complete(request: Request) -> JSONResponse:
        bodies.append(msgspec.json.decode(await request.body()))
        return JSONResponse({"choices": [reply(bodies[-1])]})

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    context = JudgeContext(lambda: "http://frontend/v1", 5.0, http=httpx.ASGITransport(app), rubric=rubric)
    return make_judge(text, context), bodies


async def test_a_judge_without_logprobs_is_asked_several_times() -> None:
    said = iter(("6", "no idea", "8", "Grade: 7"))
    judge, bodies = asked_of("model:big?draws=4", lambda _: {"message": {"content": next(said)}})
    assert await judge.score(ANSWER) == pytest.approx(100 * 7 / 9), "of the three that are grades"
    assert sorted(body["seed"] for body in bodies) == [0, 1, 2, 3]
    assert all(body["temperature"] == 1 and "logprobs" not in body for body in bodies)
    await judge.close()
    silent, _ = asked_of("model:big?draws=4", lambda _: {"message": {"content": "no idea"}})
    with pytest.raises(JudgeUnavailable, match="0 of 4 draws are verdicts"):
        await silent.score(ANSWER)
    await silent.close()
    bare, _ = asked_of("model:big", lambda _: {"message": {"content": "7"}})
    with pytest.raises(JudgeUnavailable, match=r"drawn \(model:big\?draws=5\)"):
        await bare.score(ANSWER)
    await bare.close()


def position(token: str, **top: float) -> dict[str, Any]:
    return {"token": token, "top_logprobs": [{"token": name[1:], "logprob": math.log(p)} for name, p in top.items()]}


@pytest.mark.parametrize(
    ("choice", "score"),
    [
        # Reasoning apart, and log-probabilities of all of it: the last grade is the verdict.
        (
            {
                "message": {"content": "6", "reasoning_content": "Is it 3?"},
                "logprobs": {"content": [position("3", _3=1.0), position("?"), position(" 6", _6=0.5, _7=0.5)]},
            },
            100 * 6.5 / 9,
        ),
        ({"message": {"content": "<think>Is it 3?</think> 6"}}, 100 * 6 / 9),
        ({"message": {"content": None}, "finish_reason": "length"}, None),
        ({"message": {"content": "<think>Is it 3?"}}, None),
    ],
)
async def test_a_judge_that_thinks_first_is_given_room_and_only_its_verdict_counts(
    choice: dict[str, Any], score: float | None
) -> None:
    judge, bodies = asked_of("model:thinker?think=2048", lambda _: choice)
    if score is None:
        with pytest.raises(JudgeUnavailable):
            await judge.score(ANSWER)
    else:
        assert await judge.score(ANSWER) == pytest.approx(score)
    assert bodies[0]["max_tokens"] > 2048
    await judge.close()


async def test_a_preference_is_asked_for_in_both_orders_and_counts_no_worse_as_right() -> None:
    def prefers_the_first(_body: dict[str, Any]) -> dict[str, Any]:
        return {"logprobs": {"content": [position("A", _A=0.8, _B=0.2)]}}

    judge, bodies = asked_of("preference:model:big", prefers_the_first)
    compared = JudgedAnswer("What is 2 + 2?", "4", "small", reference="four")
    assert await judge.score(compared) == pytest.approx(50.0), "what it prefers by its place cancels out"
    assert ["Answer A:\n4" in body["messages"][1]["content"] for body in bodies].count(True) == 1
    same = JudgedAnswer("What is 2 + 2?", "four", "large", reference="four")
    assert await judge.score(same) == 100.0
    with pytest.raises(JudgeUnavailable, match="no answer to compare with"):
        await judge.score(ANSWER)
    await judge.close()
    tied, _ = asked_of("preference:model:big", lambda _: {"logprobs": {"content": [position("C", _C=1.0)]}})
    assert await tied.score(compared) == 100.0
    await tied.close()
    assert compares("preference:model:big")
    assert not compares("model:preference")


async def test_a_rubric_takes_the_place_of_the_instructions_and_is_part_of_the_judges_name() -> None:
    rubric = "Grade the politeness of the answer."
    named = with_rubric("model:big?draws=1", rubric)
    assert named == f"model:big?draws=1&rubric={rubric_digest(rubric)}"
    assert with_rubric(named, rubric) == named
    assert [with_rubric(text, rubric) for text in ("exact", "confidence", "")] == ["exact", "confidence", ""]
    assert with_rubric("model:big", "") == "model:big"
    judge, bodies = asked_of(named, lambda _: {"message": {"content": "9"}}, rubric)
    assert await judge.score(ANSWER) == 100.0
    system = bodies[0]["messages"][0]["content"]
    assert system.startswith(rubric)
    assert system.endswith("Reply with the digit alone.")
    await judge.close()
    with pytest.raises(ConfigurationError, match="not the cascade's"):
        asked_of(named, lambda _: {}, "another rubric")
