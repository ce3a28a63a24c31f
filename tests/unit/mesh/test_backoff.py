"""Pauses between tries."""

import random

from mesh.backoff import Backoff, pause_after


def test_pauses_double_up_to_a_bound_and_begin_anew() -> None:
    backoff = Backoff(first_s=0.1, longest_s=1.0)
    assert [backoff.next_s() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for _ in range(5000):
        assert backoff.next_s() == 1.0
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_drawn_pauses_are_shortened_by_up_to_half() -> None:
    backoff = Backoff(first_s=0.1, longest_s=1.0, draw=random.Random(1).random)
    longest_s = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    pauses_s = [backoff.next_s() for _ in longest_s]
    assert all(bound_s / 2 <= pause_s <= bound_s for pause_s, bound_s in zip(pauses_s, longest_s, strict=True))
    assert len(set(pauses_s)) == len(pauses_s)


def test_after_no_failure_there_is_no_pause() -> None:
    assert [pause_after(failures, 1.0, 3.0) for failures in (-1, 0, 1, 2, 3, 10**9)] == [0.0, 0.0, 1.0, 2.0, 3.0, 3.0]
