import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.stop_strings import StopStrings

letters = st.text("ab", max_size=12)
stops_of = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str]) -> str:
    """By going through the text character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(pieces=st.lists(letters, max_size=8), stops=stops_of)
def test_the_text_ends_before_the_stop_string_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    filtered = StopStrings(stops)
    shown = "".join(filtered.push(piece) for piece in pieces)
    text = "".join(pieces)
    assert filtered.stopped == any(stop in text for stop in stops)
    assert shown + filtered.finish() == expected(text, stops)


@given(pieces=st.lists(letters, max_size=8), stops=stops_of)
def test_nothing_is_shown_that_could_be_the_beginning_of_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    filtered = StopStrings(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        shown += filtered.push(piece)
        if not filtered.stopped:
            held = text[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)
            for start in range(len(shown)):
                assert not any(stop.startswith(text[start:]) for stop in stops)


def test_text_without_stop_strings_passes_through() -> None:
    assert StopStrings(()).push("anything") == "anything"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
