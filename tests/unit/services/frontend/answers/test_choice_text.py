"""What a client is told of an answer does not depend on how its tokens were cut into pieces: a lagging reader, a
recovery and a move bring several at once."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.v1 import request_pb2
from services.frontend.answers.choice import ChoiceText, TextRules
from services.frontend.workers.token_mailbox import Piece

END = 0
LENGTH = request_pb2.FINISH_REASON_LENGTH
STOP = request_pb2.FINISH_REASON_STOP


class Letters:
    """Token n is the nth letter."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token_id - 1) for token_id in token_ids)

    def finish(self) -> str:
        return ""


def told(pieces: Sequence[Sequence[int]], stop: Sequence[str], finish: int, with_logprobs: bool) -> object:
    choice = ChoiceText(0, Letters(), TextRules(stop, frozenset({END})))
    text, positions = "", 0
    for number, token_ids in enumerate(pieces):
        logprobs = [request_pb2.PositionLogprobs() for _ in token_ids] if with_logprobs else ()
        last = finish if number == len(pieces) - 1 else 0
        shown = choice.push(Piece(0, list(token_ids), logprobs, last, None))
        if shown is not None:
            text, positions = text + shown.text, positions + len(shown.positions)
    return text, positions, choice.tokens, choice.finish


@given(
    token_ids=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 12)),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    ends=st.booleans(),
    with_logprobs=st.booleans(),
)
def test_pieces_do_not_matter(
    token_ids: list[int], cuts: set[int], stop: list[str], ends: bool, with_logprobs: bool
) -> None:
    token_ids = [*token_ids, END] if ends else token_ids
    borders = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    pieces = [token_ids[first:last] for first, last in pairwise(borders)]
    one_by_one = [[token_id] for token_id in token_ids]
    finish = STOP if ends else LENGTH
    assert told(pieces, stop, finish, with_logprobs) == told(one_by_one, stop, finish, with_logprobs)


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    assert told([[1, 2, 3, 1, 1]], ["bc"], LENGTH, False) == ("a", 0, 3, "stop")
