"""Questions of decisions, beside vLLM's own of the same request."""

from math import log
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.answers.decisions import DecisionTranslator
from services.frontend.errors import ApiError
from services.frontend.requests.decision_schema import DecisionRequest, Question, questions_of
from tests.examples import examples

pytestmark = pytest.mark.vllm

TEXTS = st.text(max_size=8)
ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), TEXTS)
QUESTIONS = st.fixed_dictionaries(
    {"type": st.sampled_from(["choice", "noul", "score", "riddle"])},
    optional={
        "instructions": ANYTHING,
        "criteria": st.one_of(
            st.none(),
            st.lists(ANYTHING, max_size=12),
            st.dictionaries(TEXTS, ANYTHING, max_size=28),
            st.dictionaries(st.sampled_from(["true", "false", "yes"]), ANYTHING),
        ),
    },
)


def made(fields: dict[str, Any]) -> Question | None:
    """Ours; None: it is refused."""
    try:
        return questions_of(DecisionRequest(state="", questions={"q": fields}))[0]
    except ApiError:
        return None


@settings(max_examples=examples(300), deadline=None)
@given(fields=QUESTIONS, data=st.data())
def test_a_question_is_asked_and_answered_as_vllm_does(fields: dict[str, Any], data: st.DataObject) -> None:
    from vllm.entrypoints.generate.structured_decisions.question_types import StructuredDecisionError, build_question

    ours = made(fields)
    try:
        theirs = build_question("q", fields["type"], fields.get("instructions", ""), fields.get("criteria"), 26)
    except StructuredDecisionError:
        assert ours is None
        return
    assert ours is not None
    assert (ours.text, ours.labels) == (theirs.type.prompt(theirs), theirs.labels)
    ids = {label: number for number, label in enumerate(ours.labels)}
    weights = data.draw(st.lists(st.integers(1, 99), min_size=len(ids), max_size=len(ids), unique=True))
    shares = [weight / sum(weights) for weight in weights]
    logprobs = {f"token_id:{ids[label]}": log(share / 2) for label, share in zip(ours.labels, shares, strict=True)}
    choice = {"index": 0, "logprobs": {"top_logprobs": [logprobs], "tokens": ["token_id:0"]}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    completion = {"id": "a", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    said = msgspec.json.decode(DecisionTranslator([ours], ids).whole(completion))["answers"]["q"]
    assert said == _close(theirs.type.answer(theirs, shares, 0.5))


def _close(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _close(each) for name, each in value.items()}
    return pytest.approx(value) if isinstance(value, float) else value
