"""Decisions: questions about a state."""

from typing import Any

from tests.conformance.case import Case

PATH = "/v1/systemone"
SUM: dict[str, Any] = {"type": "choice", "instructions": "What is asked?", "criteria": {"sum": "of two", "joke": None}}
RIGHT: dict[str, Any] = {"type": "noul", "instructions": "Is 4 and 5 9?"}
HARD: dict[str, Any] = {"type": "score", "instructions": "How hard is it?", "criteria": ["easy", "so so", "hard"]}


def asked(name: str, **fields: Any) -> Case:
    """Three questions, unless the fields say otherwise; a field that is `...` is left out."""
    body = {"model": "decides", "state": "Add 4 and 5.", "questions": {"q": SUM, "r": RIGHT, "s": HARD}} | fields
    given = {key: value for key, value in body.items() if value is not ...}
    return Case(f"decisions: {name}", PATH, given, served="decides")


def question(name: str, **fields: Any) -> Case:
    """A single one, whose fields are these."""
    return asked(name, questions={"q": fields})


CASES = [
    asked("of each type"),
    asked("model left out", model=...),
    asked("model unknown", model="nobody"),
    asked("state missing", state=...),
    asked("state null", state=None),
    asked("state of JSON", state={"text": "Grüße", "numbers": [1, 2.5, None, True], "in": {"a": {}}}),
    asked("state beyond the context", state="Add 1 and 2. " * 2000),
    asked("instructions", instructions="Say what you see."),
    asked("no instructions", instructions=""),
    asked("no questions", questions={}),
    asked("questions missing", questions=...),
    asked("a list of questions", questions=[SUM]),
    asked("64 questions", questions={f"q{number}": RIGHT for number in range(64)}),
    asked("65 questions", questions={f"q{number}": RIGHT for number in range(65)}),
    asked("a question without a name", questions={"": RIGHT}),
    asked("cache_salt", cache_salt="a"),
    asked("cache_salt with a slash", cache_salt="a/b"),
    asked("priority", priority=3),
    asked("request_id", request_id="mine"),
    asked("a variable of the template", chat_template_kwargs={"mood": "good"}),
    asked("thinking off", chat_template_kwargs={"enable_thinking": False}),
    asked("thinking on", chat_template_kwargs={"enable_thinking": True}),
    asked("images", images=["data:image/png;base64,AAAA"]),
    asked("no images", images=[]),
    asked("audio", audio=["data:audio/wav;base64,AAAA"]),
    asked("videos", videos=["data:video/mp4;base64,AAAA"]),
    asked("a field of no meaning", mood="good"),
    question("type missing", instructions="What?"),
    question("type unknown", type="riddle"),
    question("a field of no meaning in a question", **RIGHT, mood="good"),
    question("a choice without criteria", type="choice"),
    question("a choice without options", type="choice", criteria={}),
    question("a choice of a list", type="choice", criteria=["a", "b"]),
    question("a choice of one", type="choice", criteria={"a": "the only one"}),
    question("a choice of 26", type="choice", criteria={f"o{number}": None for number in range(26)}),
    question("a choice of 27", type="choice", criteria={f"o{number}": None for number in range(27)}),
    question("a choice described by numbers", type="choice", criteria={"a": 1, "b": True, "c": {"x": [1]}}),
    question("a choice described by nothing", type="choice", criteria={"a": "", "b": None}),
    question("instructions null", type="noul", instructions=None),
    question("instructions of JSON", type="noul", instructions={"a": [1, True]}),
    question("yes and no described", type="noul", criteria={"true": "it fits", "false": "it does not"}),
    question("yes described", type="noul", criteria={"true": "it fits"}),
    question("yes and no described by others", type="noul", criteria={"yes": "it fits"}),
    question("a scale without levels", type="score"),
    question("a scale of one", type="score", criteria=["a"]),
    question("a scale of ten", type="score", criteria=list(range(10))),
    question("a scale of eleven", type="score", criteria=list(range(11))),
    question("a scale with a level twice", type="score", criteria=["a", "a"]),
    question("a scale of an object", type="score", criteria={"a": None, "b": None}),
    Case("decisions: another kind of model", PATH, {"model": "demo-large", "state": 1, "questions": {"q": SUM}}),
]
