import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.deployment.restarts import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_RESTARTS_IN_WINDOW,
    WINDOW_S,
    AwaitEnd,
    Ended,
    Forget,
    GiveUp,
    Kill,
    Launch,
    NotStarted,
    Pause,
    PauseOver,
    ProcessEvent,
    ProcessInstruction,
    RestartHistory,
    RestartManager,
    Say,
    Started,
    StopAsked,
)
from mesh.errors import IllegalTransition
from mesh.exit_status import ExitStatus


def test_the_delay_doubles_up_to_the_bound_and_then_it_gives_up() -> None:
    history = RestartHistory()
    delays = [history.next_delay_s(0.0) for _ in range(MAX_RESTARTS_IN_WINDOW)]
    assert delays[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert max(delay for delay in delays if delay is not None) == MAX_BACKOFF_S
    assert history.next_delay_s(0.0) is None


def test_a_quiet_window_forgives() -> None:
    history = RestartHistory()
    while history.next_delay_s(0.0) is not None:
        pass
    assert history.next_delay_s(WINDOW_S) is None
    assert history.next_delay_s(WINDOW_S + 1) == FIRST_BACKOFF_S


def test_it_gives_up_however_late_the_process_begins_to_end() -> None:
    history = RestartHistory()
    for _ in range(MAX_RESTARTS_IN_WINDOW):
        assert history.next_delay_s(5000.0) is not None
    assert history.next_delay_s(5001.0) is None


@given(st.lists(st.floats(0, 1000), max_size=60))
def test_never_more_restarts_in_a_window_than_allowed(gaps_s: list[float]) -> None:
    history, now_s, restarted_s = RestartHistory(), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        if history.next_delay_s(now_s) is not None:
            restarted_s.append(now_s)
    for start_s in restarted_s:
        assert sum(start_s <= at_s <= start_s + WINDOW_S for at_s in restarted_s) <= MAX_RESTARTS_IN_WINDOW


STARTS_AGAIN: tuple[ProcessEvent, ...] = (PauseOver(), Started())


def after(*events: ProcessEvent) -> tuple[RestartManager, tuple[ProcessInstruction, ...]]:
    """A process called w after `events`, all at once, and what is said last."""
    manager, instructions = RestartManager("w", "w.log"), ()
    for event in events:
        instructions = manager.handle(event, 0.0)  # type: ignore[assignment]
        manager.validate()
    return manager, instructions


def test_a_process_that_ends_is_started_again_after_a_pause() -> None:
    _, ended = after(Started(), Ended(1, "no memory"))
    assert ended == (Say("w ended (status 1: no memory); starting it again in 0.5 s"), Pause(0.5))
    assert after(Started(), Ended(1), PauseOver())[1] == (Launch(),)
    assert after(Started(), Ended(1), *STARTS_AGAIN)[1] == (AwaitEnd(),)
    assert after(Started(), Ended(1), *STARTS_AGAIN, Ended(-9))[1][-1] == Pause(1.0)


def test_what_cannot_be_started_again_is_tried_again() -> None:
    _, instructions = after(Started(), Ended(1), PauseOver(), NotStarted("no files"))
    assert instructions == (Say("w ended (it cannot be started: no files); starting it again in 1 s"), Pause(1.0))


def test_a_process_that_keeps_ending_is_given_up_with_the_last_reason() -> None:
    manager, instructions = after(
        Started(), *(Ended(1, "no memory"), *STARTS_AGAIN) * MAX_RESTARTS_IN_WINDOW, Ended(1, "no disk")
    )
    assert instructions == (Say("w keeps ending (status 1: no disk) and is given up; see w.log"), GiveUp())
    assert manager.given_up == "it kept ending (status 1: no disk); see w.log"


def test_wrong_settings_are_given_up_at_the_first_start_alone() -> None:
    manager, instructions = after(Started(), Ended(ExitStatus.WRONG_SETTINGS, "no model"))
    wrong = "cannot run with its settings (status 2: no model)"
    assert instructions == (Say(f"w {wrong} and is given up; see w.log"), GiveUp())
    assert manager.given_up == f"it {wrong}; see w.log"
    # It ran with them before: what it needs may come back.
    _, instructions = after(Started(), Ended(1), *STARTS_AGAIN, Ended(ExitStatus.WRONG_SETTINGS))
    assert instructions[-1] == Pause(1.0)


def test_who_was_superseded_does_not_take_its_name_back() -> None:
    manager, instructions = after(Started(), Ended(ExitStatus.SUPERSEDED))
    assert instructions[-1] == GiveUp()
    assert manager.given_up == "another process of the mesh has taken its name; see w.log"


@pytest.mark.parametrize("status", [ExitStatus.STOPPED, ExitStatus.RESTART])
def test_an_end_that_was_asked_for_is_no_failure(status: ExitStatus) -> None:
    manager, instructions = after(Started(), *(Ended(status), *STARTS_AGAIN) * 20, Ended(status))
    assert instructions[-1] == Pause(0.0)
    assert manager.handle(PauseOver(), 0.0) == (Launch(),)
    assert after(Started(), *(Ended(status), *STARTS_AGAIN) * 20, Ended(1))[1][-1] == Pause(FIRST_BACKOFF_S)


def test_what_was_drained_stays_away() -> None:
    _, instructions = after(Started(), Ended(ExitStatus.DRAINED))
    assert instructions == (Say("w was drained and has ended; it is not started again"), Forget())


@pytest.mark.parametrize(
    "before",
    [
        (Started(),),
        (Started(), Ended(1)),
        (Started(), Ended(1), PauseOver()),
        (Started(), Ended(ExitStatus.SUPERSEDED)),
    ],
)
def test_once_it_is_to_stop_nothing_starts_it_again(before: tuple[ProcessEvent, ...]) -> None:
    for late in (Ended(1), PauseOver(), NotStarted("no files")):
        manager, instructions = after(*before, StopAsked(), late)
        assert instructions == ()
        assert manager.is_stopping


def test_what_starts_in_the_moment_when_it_is_to_stop_is_killed() -> None:
    assert after(StopAsked(), Started())[1] == (Kill(),)
    assert after(Started(), Ended(1), PauseOver(), StopAsked(), Started())[1] == (Kill(),)


@pytest.mark.parametrize("events", [(Ended(1),), (Started(), Started()), (Started(), PauseOver())])
def test_only_a_bug_tells_things_in_a_wrong_order(events: tuple[ProcessEvent, ...]) -> None:
    with pytest.raises(IllegalTransition, match="w is "):
        after(*events)


FOLLOWS = {AwaitEnd: Ended, Pause: PauseOver, Launch: Started}


@given(
    st.lists(st.tuples(st.integers(-15, 6), st.booleans(), st.floats(0, 60)), max_size=40),
    st.integers(0, 120),
)
def test_it_waits_for_one_thing_until_it_stops_is_drained_or_is_given_up(
    ends: list[tuple[int, bool, float]], stops_after: int
) -> None:
    manager, now_s, event = RestartManager("w", "w.log"), 0.0, Started()
    for step, (status, is_started, took_s) in enumerate(each for each in ends for _ in range(3)):
        if step == stops_after:
            manager.handle(StopAsked(), now_s)
        instructions = manager.handle(event, now_s)
        manager.validate()
        waits = [each for each in instructions if isinstance(each, AwaitEnd | Pause | Launch)]
        if not waits:
            assert instructions in ((), (Kill(),)) if manager.is_stopping else instructions[-1] in (GiveUp(), Forget())
            return
        assert waits == [instructions[-1]]
        now_s += took_s
        match waits[0]:
            case AwaitEnd():
                event = Ended(status)  # type: ignore[assignment]
            case Pause():
                event = PauseOver()  # type: ignore[assignment]
            case Launch():
                event = Started() if is_started else NotStarted("no files")  # type: ignore[assignment]
