"""Scores of generative scoring, made of the logprobs of a completion (pure)."""

from collections.abc import Sequence
from math import exp
from typing import Any, Final, Literal

import msgspec

from services.frontend.answers.schema import Usage
from services.frontend.answers.sse import encode

_NAMES: Final = {"prompt": "items", "logprob_token_ids": "label_token_ids"}
"""What a client of these scores calls the parameters of the completion."""


class ItemScore(msgspec.Struct):
    """How likely the first label follows an item."""

    index: int
    """Of the item, as the request gave them."""
    score: float
    object: Literal["score"] = "score"


class GenerativeScores(msgspec.Struct):
    """POST /generative_scoring"""

    id: str
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage
    object: Literal["list"] = "list"


class ScoringTranslator:
    """A `Translator` of a completion that has one choice for each item."""

    def __init__(self, label_token_ids: Sequence[int], *, is_among_labels: bool) -> None:
        """`is_among_labels`: the probabilities of the labels add up to 1; if not, those of all tokens do."""
        self._labels = tuple(dict.fromkeys(label_token_ids))
        self._is_among_labels = is_among_labels

    def whole(self, completion: dict[str, Any]) -> bytes:
        scores = [ItemScore(choice["index"], self._score(choice)) for choice in completion["choices"]]
        usage = msgspec.convert(completion["usage"], Usage)
        answer = GenerativeScores(completion["id"], completion["created"], completion["model"], scores, usage)
        return encode(answer)

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Nothing: scores are not streamed."""
        return b""

    def end(self) -> bytes:
        """Nothing: see `event`."""
        return b""

    def failed(self, error: dict[str, Any], *, streamed: bool) -> bytes:
        return encode({"error": {**error, "param": _NAMES.get(error["param"], error["param"])}})

    def _score(self, choice: dict[str, Any]) -> float:
        (logprobs,) = choice["logprobs"]["top_logprobs"]
        probabilities = [exp(logprobs[f"token_id:{label}"]) for label in self._labels]
        return probabilities[0] / (sum(probabilities) if self._is_among_labels else 1.0)
