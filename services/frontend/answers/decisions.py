"""Answers to questions about a state, made of the logprobs of a completion (pure)."""

from collections.abc import Mapping, Sequence
from math import exp
from typing import Any, Literal

import msgspec

from services.frontend.answers.sse import encode
from services.frontend.requests.decision_schema import Question, QuestionType


class DecisionUsage(msgspec.Struct):
    """Tokens of all questions together."""

    input_tokens: int
    output_tokens: int


class QuestionDiagnostics(msgspec.Struct):
    """Whether the model took the question as one of its options."""

    label_mass: float
    """How likely a reply begins with any of the labels."""
    argmax_is_label: bool
    """The likeliest first token is one of them."""


class Decisions(msgspec.Struct):
    """POST /v1/systemone"""

    id: str
    created: int
    model: str
    answers: dict[str, dict[str, Any]]
    usage: DecisionUsage
    diagnostics: dict[str, QuestionDiagnostics]
    object: Literal["structured_decision"] = "structured_decision"


class DecisionTranslator:
    """A `Translator` of a completion that has one choice for each question."""

    def __init__(self, questions: Sequence[Question], label_token_ids: Mapping[str, int]) -> None:
        self._questions = tuple(questions)
        self._token_ids = label_token_ids

    def whole(self, completion: dict[str, Any]) -> bytes:
        answers, diagnostics = {}, {}
        choices = sorted(completion["choices"], key=lambda choice: int(choice["index"]))
        for question, choice in zip(self._questions, choices, strict=True):
            names = [f"token_id:{self._token_ids[label]}" for label in question.labels]
            (logprobs,), (first,) = choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"]
            mass = sum(exp(logprobs[name]) for name in names)
            answers[question.id] = _answer(question, _shares([logprobs[name] for name in names]), mass)
            diagnostics[question.id] = QuestionDiagnostics(mass, first in names)
        usage = DecisionUsage(completion["usage"]["prompt_tokens"], completion["usage"]["completion_tokens"])
        return encode(
            Decisions(completion["id"], completion["created"], completion["model"], answers, usage, diagnostics)
        )

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Nothing: answers are not streamed."""
        return b""

    def end(self) -> bytes:
        """Nothing: see `event`."""
        return b""

    def failed(self, error: dict[str, Any], *, streamed: bool) -> bytes:
        return encode({"error": {**error, "param": "state" if error["param"] == "prompt" else error["param"]}})


def _shares(logprobs: list[float]) -> list[float]:
    """How likely each label is among them; they add up to 1."""
    weights = [exp(logprob - max(logprobs)) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]


def _answer(question: Question, shares: list[float], mass: float) -> dict[str, Any]:
    """`confidence`: how likely a reply begins with the label of the answer."""
    best = shares.index(max(shares))
    common = {"type": question.type, "confidence": shares[best] * mass}
    if question.type is QuestionType.CHOICE:
        by_name = dict(zip(question.options, shares, strict=True))
        return {**common, "choice": question.options[best], "probabilities": by_name}
    if question.type is QuestionType.NOUL:
        return {**common, "noul": shares[0], "probabilities": dict(zip(question.labels, shares, strict=True))}
    return {
        **common,
        "score": sum(level * share for level, share in enumerate(shares)),
        "legend": dict(zip(question.labels, question.options, strict=True)),
        "probabilities": dict(zip(question.labels, shares, strict=True)),
    }
