"""The `id:` lines of streamed answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.answers.choice import ChoicePiece, Finish
from services.frontend.answers.event_ids import Covered, EventIds

PIECES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.sampled_from([None, None, "stop", "length"])))


@given(PIECES)
def test_the_id_of_an_event_says_what_its_client_has(pieces: list[tuple[int, int, Finish | None]]) -> None:
    ids, tokens, ended = EventIds(3), [0, 0, 0], [False] * 3
    for index, more, finish in pieces:
        if ended[index]:
            continue
        tokens[index] += more
        ended[index] = finish is not None
        line = ids.after(ChoicePiece(index, "text", (), finish, tokens[index])).decode()
        assert line.startswith("id: ")
        assert line.endswith("\n")
        covered = Covered.parse(line[4:-1], 3)
        assert covered == Covered(tuple(tokens), tuple(ended))
        resumed = EventIds(3)
        resumed.start(covered)
        assert Covered.parse(resumed.with_usage().decode()[4:-1], 3) == Covered(tuple(tokens), tuple(ended), usage=True)


@given(st.integers(0, 5), st.integers(0, 6))
def test_events_before_the_first_token_are_counted(count: int, had: int) -> None:
    events = b"".join(b'data: {"number":%d}\n\n' % number for number in range(count))
    sent = EventIds(1).of_first_events(events, had)
    assert sent.count(b"data: ") == max(0, count - had)
    assert EventIds(1).of_first_events(events, None) == b""
    if had < count:
        last = sent.split(b"\n\n")[-2].split(b"\n")[0].removeprefix(b"id: ").decode()
        assert Covered.parse(last, 1).first_events == count


@given(st.text())
def test_whatever_a_client_sends_is_an_id_or_refused(text: str) -> None:
    try:
        covered = Covered.parse(text, 1)
    except ValueError:
        return
    assert len(covered.tokens) == 1


@pytest.mark.parametrize("event_id", ["1.2", "", "e", "u", ".u", "1.u.u", "1 ", "h", "h99999", "-1", "1e5", "\u0661"])
def test_what_is_no_id_of_the_stream_is_refused(event_id: str) -> None:
    with pytest.raises(ValueError, match="stream"):
        Covered.parse(event_id, 1)
