"""How answers are compared: what two streams mean, which differences count, and what the page says."""

import msgspec
import pytest

from tests.clients.matrix import written_into
from tests.conformance.all_cases import CASES
from tests.conformance.answers import Answer, events_of, folded
from tests.conformance.case import Case
from tests.conformance.compare import ABSENT, Difference, differences
from tests.conformance.deliberate import DELIBERATE, MOST, explanation
from tests.conformance.report import Outcome, page
from tests.conformance.servers import SERVED

CASE = Case("chat: plain", "/v1/chat/completions", {})


def chunk(text: str, **fields: object) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, **fields}
    return f"data: {msgspec.json.encode({'id': 'x', 'choices': [choice]}).decode()}\n\n"


def answer(body: object, status: int = 200, content_type: str = "application/json") -> Answer:
    return Answer(status, content_type, body)


def streamed(*chunks: str, done: bool = True) -> Answer:
    return answer(folded(events_of("".join(chunks) + ("data: [DONE]\n\n" if done else ""))), 200, "text/event-stream")


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    generation = {"chat", "completions", "responses", "messages", "tokenizer", "server"}
    assert {case.subject for case in CASES} == generation | {"embeddings", "pooling", "classes", "scores", "decisions"}
    assert {case.served for case in CASES} == set(SERVED)


def test_events_are_read_with_their_types() -> None:
    text = ": comment\n\nevent: a\ndata: 1\ndata: 2\n\ndata: 3\n\nid: 7\ndata: 4\n"
    assert list(events_of(text)) == [("a", "1\n2"), ("", "3"), ("", "4")]


def test_how_a_stream_is_cut_is_no_difference() -> None:
    one = streamed(chunk("Hello"), chunk("!", finish_reason="stop"))
    other = streamed(chunk("He"), chunk("ll"), chunk("o"), chunk("!", finish_reason="stop"))
    assert differences(one, other) == []


@pytest.mark.parametrize(
    ("mesh", "place"),
    [
        (streamed(chunk("Hallo"), chunk("!", finish_reason="stop")), "body.events..all.choices[0].delta.content"),
        (streamed(chunk("Hello"), chunk("!", finish_reason="length")), "body.events..all.choices[0].finish_reason"),
        (streamed(chunk("Hello"), chunk("!", finish_reason="stop"), done=False), "body.done"),
        (
            streamed(chunk("Hello", x=1), chunk("!", finish_reason="stop", x=1)),
            "body.events..all.choices[0].x",
        ),
    ],
)
def test_what_a_stream_says_is_compared(mesh: Answer, place: str) -> None:
    stock = streamed(chunk("Hello"), chunk("!", finish_reason="stop"))
    assert place in [each.place for each in differences(stock, mesh)]


def test_a_field_of_every_chunk_is_told_from_one_of_some() -> None:
    every = streamed(chunk("a", x=1), chunk("b", x=1))
    some = streamed(chunk("a", x=1), chunk("b"))
    assert [each.kind for each in differences(every, some)] == ["body.events..fields..choices[].x"]


def test_typed_events_are_compared_by_type_and_order() -> None:
    stock = streamed('event: a\ndata: {"delta":"x"}\n\n', 'event: b\ndata: {"item":{"text":"x"}}\n\n')
    mesh = streamed(
        'event: a\ndata: {"delta":"y"}\n\n', 'event: a\ndata: {"delta":"z"}\n\n', 'event: c\ndata: {"n":1}\n\n'
    )
    assert {each.place for each in differences(stock, mesh)} == {
        "body.order[1]",
        "body.events.a.all.delta",
        "body.events.b",
        "body.events.c",
    }


def test_ids_and_times_count_by_their_type_alone() -> None:
    stock = answer({"id": "chatcmpl-1", "created": 5, "error": {"message": "one"}})
    assert differences(stock, answer({"id": "chatcmpl-2", "created": 9, "error": {"message": "other"}})) == []
    assert [
        each.place for each in differences(stock, answer({"id": None, "created": 9, "error": {"message": ""}}))
    ] == ["body.id"]


def test_null_is_told_from_what_is_not_there_and_numbers_may_be_near() -> None:
    stock = answer({"a": None, "logprob": -0.5, "list": [1, 2]})
    (found,) = differences(stock, answer({"logprob": -0.5001, "list": [1, 2]}))
    assert (found.place, found.stock, found.mesh) == ("body.a", "None", ABSENT)
    mesh = answer({"a": None, "logprob": -0.6, "list": [1]})
    assert [each.place for each in differences(stock, mesh)] == ["body.logprob", "body.list.length"]


def test_another_status_is_all_there_is_to_say() -> None:
    (found,) = differences(answer({"a": 1}), answer({"error": {"message": "no"}}, 400))
    assert str(found) == "status: 200 | 400 (no)"


def test_few_differences_are_on_purpose_and_each_says_why() -> None:
    assert len(DELIBERATE) <= MOST
    assert all(each.what and each.reason and each.where for each in DELIBERATE)
    param = Difference("body.error.param", "None", "messages")
    assert explanation(CASE, param) is not None
    assert explanation(CASE, Difference("body.choices[0].message.content", "a", "b")) is None
    assert explanation(CASE, Difference("status", "200", "400")) is None
    response = Case("responses: plain", "/v1/responses")
    assert explanation(response, Difference("body.order[8]", "response.completed", "response.incomplete")) is not None
    assert explanation(response, Difference("body.order[8]", "response.completed", "response.failed")) is None
    final = "body.events.response.completed.all.response.output[0].content[0].text"
    assert explanation(response, Difference(final, "a", "b")) is None


def test_the_page_counts_and_names_what_is_left() -> None:
    purpose = Outcome(CASE, (Difference("body.error.param", "None", "messages"),))
    left = Outcome(
        Case("chat: left", "/x"), (Difference("body.a[3].b", "one|two", "<b>"), Difference("body.c", "1", "2"))
    )
    text = page([Outcome(CASE), purpose, left])
    assert "| chat | 3 | 1 | 1 | 1 |" in text
    assert "| all | 3 | 1 | 1 | 1 |" in text
    assert "| chat: left | `body.a[].b` +1 | one\\|two | &lt;b> |" in text
    assert "Not yet the same" not in page([Outcome(CASE), purpose])
    written = written_into("before BEGIN former END after", text, "BEGIN", "END")
    assert written.startswith("before BEGIN\n\n| asked")
    assert written.endswith("END after")
    assert "former" not in written
