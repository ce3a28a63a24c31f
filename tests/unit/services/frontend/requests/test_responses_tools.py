"""Custom tools of Responses: a text, as the arguments of a function."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.requests.responses_tools import CustomTextReader, custom_arguments, custom_text
from tests.examples import examples

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
STEPS = st.integers(1, 5)


def pieces(text: str, step: int) -> list[str]:
    return [text[place : place + step] for place in range(0, len(text), step)]


@settings(max_examples=examples(200), deadline=None)
@given(TEXTS, STEPS, st.booleans())
def test_a_text_is_read_as_it_comes(text: str, step: int, is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}) if is_ascii else custom_arguments(text)
    reader, read = CustomTextReader(), ""
    for piece in pieces(arguments, step):
        read += reader.add(piece)
        assert text.startswith(read)
        assert reader.text == read
    assert read == text, "all of it has come before the end"
    assert (reader.end(), reader.text) == ("", text)
    assert custom_text(arguments) == text


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(['{"input": "', '{"input": "a', "", '{"other": 1}', "[", '{"input": 1}']), TEXTS, STEPS)
def test_what_is_no_such_call_is_told_as_it_is(begin: str, text: str, step: int) -> None:
    arguments = begin + text
    reader = CustomTextReader()
    read = "".join(map(reader.add, pieces(arguments, step)))
    rest = reader.end()
    assert reader.text == custom_text(arguments)
    assert reader.text in (read + rest, rest), "what was read, gone on with, or all of it anew"


def test_half_a_character_waits_for_the_other() -> None:
    reader = CustomTextReader()
    read = [reader.add(piece) for piece in ('{"input": "a\\ud83d', "\\u", "de42", "b", '"}')]
    assert read == ["a", "", "\U0001f642", "b", ""]


def test_half_a_character_alone_is_none() -> None:
    assert CustomTextReader().add('{"input": "a\\ud83dx') == "a\ufffdx"
    assert custom_text('{"input": "a\\ud83dx\\ude42"}') == "a\ufffdx\ufffd"
