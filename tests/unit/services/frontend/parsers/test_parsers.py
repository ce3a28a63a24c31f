"""Every parser: what an answer says, the same wherever its text is cut, at a price that does not grow."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.parsers.argument_types import typed, types_of
from services.frontend.parsers.deltas import MessageDelta, TextParser
from services.frontend.parsers.forced import NamedParser, RequiredParser
from services.frontend.parsers.hermes import HermesParser
from services.frontend.parsers.json_members import ObjectReader
from services.frontend.parsers.llama3_json import Llama3JsonParser
from services.frontend.parsers.qwen3_coder import Qwen3CoderParser
from services.frontend.parsers.reasoning import PlainText, ReasoningParser, ReasoningTokens, is_reasoning_open

SCHEMAS = {
    "weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "of": {"type": ["object", "null"]}},
    "now": {},
}
MAKES: dict[str, Callable[[], TextParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "qwen3_coder": lambda: Qwen3CoderParser(SCHEMAS),
    "required": RequiredParser,
    "named": lambda: NamedParser("weather"),
    "reasoning": lambda: ReasoningParser(HermesParser()),
    "reasoning_xml": lambda: ReasoningParser(Qwen3CoderParser(SCHEMAS), ("<tool_call>",)),
    "reasoning_text": lambda: ReasoningParser(PlainText()),
}


@dataclass
class Told:
    """All that a parser has told."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each."""

    def add(self, delta: MessageDelta) -> "Told":
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(self.calls), "calls begin in order"
                self.calls.append([call.name, ""])
            assert call.index == len(self.calls) - 1, "only the last call goes on"
            self.calls[call.index][1] += call.arguments
        return self


def told(parser: TextParser, pieces: Sequence[str], *, finish: bool = True) -> Told:
    so_far = Told()
    for piece in pieces:
        so_far.add(parser.push(piece))
    return so_far.add(parser.finish()) if finish else so_far


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def xml(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


WEATHER = {"city": 'Ber"gen\\ ü 🙂 {[', "days": 3}
WEATHER_JSON = json.dumps(WEATHER, ensure_ascii=False)
CALLS = [
    ("hermes", f"Let me look.{hermes('weather', WEATHER)}\n{hermes('now', {})}", "Let me look."),
    ("hermes", f"\n\n{hermes('weather', WEATHER)}\n{hermes('now', {})}\n", ""),
    ("hermes", f'<tool_call>{{"arguments": {WEATHER_JSON}, "name": "weather"}}{hermes("now", {})}', ""),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {WEATHER_JSON}}}; {{"name": "now", "arguments": {{}}}}',
        "",
    ),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "weather", "parameters": {WEATHER_JSON}}};{{"name":"now","parameters":{{}}}}',
        "",
    ),
    ("qwen3_coder", f"Well\n{xml('weather', city=WEATHER['city'], days='3')}\n{xml('now')}", "Well\n"),
    ("required", f'[{{"name": "weather", "parameters": {WEATHER_JSON}}}, {{"name": "now", "parameters": {{}}}}]', ""),
    ("reasoning", f"<think>hm\n</think>\n\n{hermes('weather', WEATHER)}{hermes('now', {})}", ""),
    ("reasoning_xml", f"hm\n{xml('weather', city=WEATHER['city'], days='3')}{xml('now')}", ""),
]


@pytest.mark.parametrize(("parser", "text", "content"), CALLS)
def test_calls_are_told_of(parser: str, text: str, content: str) -> None:
    answer = told(MAKES[parser](), [text])
    assert [name for name, _ in answer.calls] == ["weather", "now"]
    assert [json.loads(arguments) for _, arguments in answer.calls] == [WEATHER, {}]
    assert answer.content == content
    assert answer.reasoning == ("hm\n" if parser.startswith("reasoning") else "")


@pytest.mark.parametrize(("parser", "text", "content"), CALLS)
def test_wherever_a_text_is_cut_the_same_is_told(parser: str, text: str, content: str) -> None:
    whole = told(MAKES[parser](), [text])
    assert told(MAKES[parser](), list(text)) == whole
    for at in range(len(text)):
        assert told(MAKES[parser](), [text[:at], text[at:]]) == whole


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=weather>", "<function=", "</function>", "<parameter=city>", ">",
        "<parameter=days>", "<parameter=of>", "</parameter>", "<think>", "</think>", "<", "</", '{"name": "weather"',
        ', "arguments": ', ', "parameters": ', '{"city": "Bergen"}', "{", "}", "[", "]", '"', "\\", ",", ";", ":", "1",
        "12", "null", "\n", " ", "x", "ü", "🙂", "<|python_tag|>", '"name"', '"now"',
    ]
)  # fmt: skip


@given(st.sampled_from(sorted(MAKES)), st.lists(PIECES, max_size=25), st.data())
def test_what_was_told_depends_on_the_text_alone(name: str, pieces: list[str], data: st.DataObject) -> None:
    """At every moment, not only at the end: a stream that is resumed goes on where it stood."""
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut, character = MAKES[name](), MAKES[name]()
    ours, theirs = Told(), Told()
    for part in parts:
        ours.add(cut.push(part))
        for one in part:
            theirs.add(character.push(one))
        assert ours == theirs
    assert ours.add(cut.finish()) == theirs.add(character.finish())


@given(st.text(st.sampled_from("ab <>{}\n"), max_size=40))
def test_text_without_calls_stays_as_it_is(text: str) -> None:
    for name in ("hermes", "qwen3_coder", "llama3_json"):
        assert told(MAKES[name](), list(text)) == Told(content=text), name


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>no JSON</tool_call> and on"),
        ("hermes", '<tool_call>{"a": 1}</tool_call>'),
        ("hermes", '<tool_call>{"na'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"answer": 4'),
        ("llama3_json", "{no JSON"),
        ("qwen3_coder", "<tool_call>no function"),
        ("required", '{"name": 1}'),
    ],
)
def test_what_is_no_call_is_text(parser: str, text: str) -> None:
    assert told(MAKES[parser](), [text]) == Told(content=text)


def test_names_come_before_arguments_and_arguments_as_they_are_written() -> None:
    parser = HermesParser()
    first = parser.push('<tool_call>{"name": "weather", "arguments": {"city": "Ber')
    assert told(HermesParser(), ['<tool_call>{"name": "weath'], finish=False) == Told()
    assert [(call.name, call.arguments) for call in first.calls] == [("weather", '{"city": "Ber')]
    assert [(call.name, call.arguments) for call in parser.push("gen").calls] == [(None, "gen")]


def test_strings_of_the_xml_kind_are_passed_on_and_other_values_wait_for_their_end() -> None:
    parser = Qwen3CoderParser(SCHEMAS)
    parser.push("<tool_call><function=weather>")
    assert told_of(parser.push("<parameter=city>\nBer")) == '{"city": "Ber'
    assert told_of(parser.push("gen\n")) == "gen"
    assert told_of(parser.push("</parameter><parameter=days>1")) == '", "days": '
    assert told_of(parser.push("2</parameter></function>")) == "12}"


def told_of(delta: MessageDelta) -> str:
    return "".join(call.arguments for call in delta.calls)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "integer"}, 12),
        ("12", {"type": "string"}, "12"),
        ("12.0", {"type": "number"}, 12),
        ("1.5", {"type": ["number", "null"]}, 1.5),
        ("NaN", {"type": "number"}, "NaN"),
        ("Null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("yes", {"type": "boolean"}, "yes"),
        ("TRUE ", {"type": "bool"}, True),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("[1e999]", {"type": "array"}, "[1e999]"),
        ("2", {"enum": [1, 2]}, 2),
        ("x", {"enum": ["x", None]}, "x"),
        ("x", {}, "x"),
        ("x", True, "x"),
    ],
)
def test_bare_text_becomes_what_the_schema_says(text: str, schema: Any, value: Any) -> None:
    assert typed(text, types_of(schema)) == value


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
            max_leaves=8,
        ),
        max_size=5,
    ),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_the_members_of_any_object_are_read(value: dict[str, Any], indent: int | None, ascii: bool) -> None:
    text, reader = json.dumps(value, indent=indent, ensure_ascii=ascii), ObjectReader()
    read: dict[str, str] = {}
    for character in text:
        pieces, rest = reader.read(character)
        assert not rest
        for piece in pieces:
            read[piece.key] = read.get(piece.key, "") + piece.text
    assert reader.has_ended
    assert {json.loads(f'"{key}"'): json.loads(text) for key, text in read.items()} == value
    assert reader.read("behind") == ([], "behind")


def test_whether_an_answer_begins_with_reasoning() -> None:
    begin, end, turn = 7, 8, frozenset((9,))
    assert is_reasoning_open([1, 2], begin, end)
    assert is_reasoning_open([1, begin], begin, end)
    assert not is_reasoning_open([1, begin, 3, end, 4], begin, end)
    assert is_reasoning_open([begin, end, 9, 2], begin, end, turn), "that was an earlier turn's"


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(1, 4))
def test_tokens_of_the_reasoning_are_counted_however_they_come(token_ids: list[int], step: int) -> None:
    begin, end, call = 4, 5, 6
    tokens = ReasoningTokens(begin, frozenset((end, call)), is_open=True)
    for at in range(0, len(token_ids), step):
        tokens.push(token_ids[at : at + step])
    ends = [at for at, token_id in enumerate(token_ids) if token_id in (end, call)]
    reasoning = token_ids[: ends[0]] if ends else token_ids
    assert tokens.count == len([token_id for token_id in reasoning if token_id != begin])
    closed = ReasoningTokens(begin, frozenset((end,)), is_open=False)
    closed.push(token_ids)
    assert closed.count == 0


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "qwen3_coder", "required", "reasoning"])
def test_a_piece_costs_the_same_however_long_the_call_is(name: str) -> None:
    """Counted in the characters that a parser keeps, since a clock would tell of the machine."""
    long = "x y " * 5000
    openings = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
        "reasoning": '</think><tool_call>{"name": "f", "arguments": {"a": "',
        "llama3_json": '{"name": "f", "parameters": {"a": "',
        "qwen3_coder": "<tool_call><function=weather><parameter=city>",
        "required": '[{"name": "f", "parameters": {"a": "',
    }
    parser = MAKES[name]()
    told(parser, [openings[name], long], finish=False)
    assert kept_characters(parser) < 100


def kept_characters(value: object, seen: set[int] | None = None) -> int:
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(kept_characters(each, seen) for each in value)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = [getattr(value, name) for name in slots] + list(getattr(value, "__dict__", {}).values())
    inner = type(value).__module__.startswith("services.frontend.parsers")
    return sum(kept_characters(each, seen) for each in fields if not callable(each)) if inner else 0
