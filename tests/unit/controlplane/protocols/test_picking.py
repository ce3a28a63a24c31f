"""One request that passes a gateway, its body cut anyhow, its end coming at any moment."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.picking import (
    MAX_PIECE_BYTES,
    AnswerHeaders,
    Because,
    BodyLate,
    Closed,
    End,
    Event,
    Hang,
    Instruction,
    NotPicked,
    Pick,
    Picked,
    PickingManager,
    PickingState,
    Piece,
    Refuse,
    RequestHeaders,
    RequestLate,
    SendAnswerHeaders,
    SendHeaders,
    SendPiece,
    SendTrailers,
    Trailers,
    Way,
)
from mesh.errors import IllegalTransition

LIMIT = 200_000
ENDPOINTS = ("10.0.0.1:8000", "10.0.0.2:8000")


def sent(instructions: list[Instruction], way: Way) -> list[SendPiece]:
    return [each for each in instructions if isinstance(each, SendPiece) and each.way is way]


def ends(instructions: list[Instruction]) -> list[End]:
    return [each for each in instructions if isinstance(each, End)]


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(body), *(each % (len(body) + 1) for each in cuts)})
    return [body[start:stop] for start, stop in itertools.pairwise(places)] or [b""]


def arriving(body: bytes, cuts: list[int], way: Way, *, has_trailers: bool, has_empty_end: bool) -> list[Event]:
    pieces = cut(body, cuts)
    if has_empty_end:
        pieces.append(b"")
    last = len(pieces) - 1
    events: list[Event] = [
        Piece(way, piece, ends=index == last and not has_trailers) for index, piece in enumerate(pieces)
    ]
    return [*events, Trailers(way)] if has_trailers else events


WHOLE = st.tuples(st.binary(max_size=300), st.integers(1, 700), st.lists(st.integers(0, 10**6), max_size=8))


@given(WHOLE, WHOLE, st.booleans(), st.booleans(), st.booleans())
def test_however_bodies_are_cut_all_of_them_goes_on_once_and_in_order(
    request: tuple[bytes, int, list[int]],
    answer: tuple[bytes, int, list[int]],
    has_trailers: bool,
    has_empty_end: bool,
    is_picked: bool,
) -> None:
    manager = PickingManager(LIMIT)
    asked, told = request[0] * request[1], answer[0] * answer[1]
    asked, told = asked[:LIMIT], told[:LIMIT]
    done: list[Instruction] = manager.handle(RequestHeaders(ends=False))
    assert not done, "nothing goes on before the body is whole"
    events = arriving(asked, request[2], Way.REQUEST, has_trailers=has_trailers, has_empty_end=has_empty_end)
    for event in events:
        assert not done
        done = manager.handle(event)
        manager.validate()
    assert done == [Pick(asked)]
    endpoints = ENDPOINTS if is_picked else ()
    done = manager.handle(Picked(endpoints))
    manager.validate()
    assert done[0] == SendHeaders(endpoints)
    pieces = sent(done, Way.REQUEST)
    assert b"".join(piece.content for piece in pieces) == asked
    assert all(len(piece.content) <= MAX_PIECE_BYTES for piece in pieces)
    assert [piece.ends for piece in pieces] == [*[False] * (len(pieces) - 1), not has_trailers]
    assert (done[-1] == SendTrailers(Way.REQUEST)) is has_trailers
    assert manager.handle(AnswerHeaders(200, ends=False)) == [SendAnswerHeaders()]
    answering: list[Instruction] = []
    for event in arriving(told, answer[2], Way.ANSWER, has_trailers=has_trailers, has_empty_end=has_empty_end):
        assert not ends(answering)
        answering += manager.handle(event)
        manager.validate()
    assert b"".join(piece.content for piece in sent(answering, Way.ANSWER)) == told
    assert ends(answering) == ([End(True, "finished")] if is_picked else [])
    assert ends(manager.handle(Closed())) == []


EVENTS = st.lists(
    st.sampled_from(
        [
            RequestHeaders(ends=False),
            RequestHeaders(ends=True),
            Piece(Way.REQUEST, b"x" * 60_000, ends=False),
            Piece(Way.REQUEST, b"y" * 60_000, ends=True),
            Piece(Way.ANSWER, b"z", ends=False),
            Piece(Way.ANSWER, b"z", ends=True),
            Trailers(Way.REQUEST),
            Trailers(Way.ANSWER),
            AnswerHeaders(200, ends=False),
            AnswerHeaders(503, ends=True),
            Picked(ENDPOINTS),
            Picked(()),
            NotPicked(),
            BodyLate(),
            RequestLate(),
            Closed(),
        ]
    ),
    max_size=14,
)


@given(EVENTS)
def test_whatever_a_gateway_says_each_pick_ends_once_and_nothing_stays_held(events: list[Event]) -> None:
    manager = PickingManager(LIMIT)
    done: list[Instruction] = []
    picks = 0
    for event in [RequestHeaders(ends=False), *events, Closed()]:
        before = manager.state
        try:
            done += manager.handle(event)
            picks += isinstance(event, Picked) and bool(event.endpoints) and before is not PickingState.WAITING
        except IllegalTransition:
            assert manager.state is before
        manager.validate()
        if any(isinstance(each, Refuse | Hang) for each in done):
            break  # the stream is closed then
    done += manager.handle(Closed())
    assert manager.held_bytes == 0
    assert manager.state is PickingState.ENDED
    assert len(ends(done)) == picks
    assert sum(isinstance(each, Refuse) for each in done) <= 1


def test_a_request_without_a_body_goes_on_at_once_and_is_not_counted() -> None:
    manager = PickingManager(LIMIT)
    assert manager.handle(RequestHeaders(ends=True)) == [SendHeaders(())]
    assert manager.handle(AnswerHeaders(200, ends=True)) == [SendAnswerHeaders()]
    assert manager.handle(Closed()) == []


def test_a_body_that_is_too_large_is_refused_before_it_is_whole() -> None:
    manager = PickingManager(10)
    manager.handle(RequestHeaders(ends=False))
    assert manager.handle(Piece(Way.REQUEST, b"x" * 10, ends=False)) == []
    assert manager.handle(Piece(Way.REQUEST, b"x", ends=False)) == [Refuse(Because.TOO_LARGE)]
    assert manager.held_bytes == 0


@pytest.mark.parametrize(("event", "because"), [(BodyLate(), Because.TOO_SLOW), (NotPicked(), Because.NOT_PICKED)])
def test_what_does_not_come_in_time_or_has_no_place_is_refused(event: Event, because: Because) -> None:
    for first in ((), (RequestHeaders(ends=False),)):
        manager = PickingManager(LIMIT)
        for each in first:
            manager.handle(each)
        assert manager.handle(event) == [Refuse(because)]


def test_the_reason_of_an_end_says_what_the_server_answered() -> None:
    for status, end in ((200, End(True, "finished")), (400, End(True, "status_400")), (503, End(False, "status_503"))):
        manager = _sent()
        assert ends(manager.handle(AnswerHeaders(status, ends=True))) == [end]


def test_a_client_that_goes_and_a_request_that_takes_too_long_end_it() -> None:
    assert _sent().handle(Closed()) == [End(False, "aborted")]
    assert _sent().handle(RequestLate()) == [End(False, "deadline"), Hang()]
    late = _sent()
    late.handle(AnswerHeaders(200, ends=True))
    assert late.handle(RequestLate()) == [Hang()]


def test_an_answer_that_does_not_pass_has_ended_with_its_stream() -> None:
    for status, end in ((200, End(True, "finished")), (502, End(False, "status_502"))):
        manager = _sent(hears_answer=False)
        assert manager.handle(AnswerHeaders(status, ends=False)) == [SendAnswerHeaders()]
        assert manager.handle(Closed()) == [end]
    assert _sent(hears_answer=False).handle(Closed()) == [End(False, "aborted")]


def test_a_gateway_that_answers_by_itself_gets_the_rest_of_the_request_back() -> None:
    manager = PickingManager(LIMIT)
    manager.handle(RequestHeaders(ends=False))
    manager.handle(Piece(Way.REQUEST, b"abc", ends=False))
    assert manager.handle(AnswerHeaders(408, ends=True)) == [SendAnswerHeaders()]
    assert manager.handle(Piece(Way.REQUEST, b"d", ends=True)) == [SendPiece(Way.REQUEST, b"d", True)]


def _sent(*, hears_answer: bool = True) -> PickingManager:
    manager = PickingManager(LIMIT)
    manager.handle(RequestHeaders(ends=False, hears_answer=hears_answer))
    manager.handle(Piece(Way.REQUEST, b"{}", ends=True))
    manager.handle(Picked(ENDPOINTS))
    return manager
