"""Beats are counted on a scheduler that the test turns."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv.heartbeat import Heartbeat

SILENT_BEATS = 4


class Turned:
    """Calls what is scheduled when `turn` is called."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None

    def __call__(self, delay_s: float, call: Callable[[], None]) -> "Turned":
        assert delay_s == 0.5
        assert self.call is None, "scheduled twice"
        self.call = call
        return self

    def cancel(self) -> None:
        self.call = None

    def turn(self) -> None:
        call, self.call = self.call, None
        assert call is not None
        call()


class Beating:
    """A heartbeat and what came of it."""

    def __init__(self) -> None:
        self.clock = Turned()
        self.said = 0
        self.lost: list[str] = []
        self.heart = Heartbeat(0.5, SILENT_BEATS, say=self._say, lost=self.lost.append, schedule=self.clock)

    def _say(self) -> None:
        self.said += 1


def test_a_silent_peer_is_lost_once() -> None:
    beating = Beating()
    beating.heart.start()
    beating.heart.start()
    for _ in range(SILENT_BEATS):
        beating.clock.turn()
        assert not beating.lost
    beating.clock.turn()
    assert len(beating.lost) == 1
    assert "4 beats of 0.5 s" in beating.lost[0]
    assert beating.said == SILENT_BEATS
    assert beating.clock.call is None, "nobody beats for a lost peer"


def test_nothing_beats_while_nothing_moves() -> None:
    beating = Beating()
    assert beating.clock.call is None
    beating.heart.start()
    beating.heart.stop()
    assert beating.clock.call is None


def test_silence_is_counted_anew_with_the_next_transfer() -> None:
    beating = Beating()
    for _ in range(3):
        beating.heart.start()
        for _ in range(SILENT_BEATS):
            beating.clock.turn()
        beating.heart.stop()
    assert not beating.lost


@given(st.lists(st.booleans(), max_size=60))
def test_lost_exactly_after_that_many_beats_without_a_word(heard_after_beat: list[bool]) -> None:
    beating = Beating()
    beating.heart.start()
    silent = 0
    for heard in heard_after_beat:
        beating.clock.turn()
        if silent == SILENT_BEATS:
            assert beating.lost
            return
        assert not beating.lost
        silent += 1
        if heard:
            beating.heart.heard()
            silent = 0
