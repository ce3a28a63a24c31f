"""A process is asked to end once, by a signal or by RPC, and its exit status tells a supervisor what to do next."""

from mesh.exit_status import ExitStatus
from mesh.shutdown import Shutdown


def test_the_first_signal_drains_and_the_second_cuts() -> None:
    shutdown = Shutdown()
    shutdown.on_signal()
    assert (shutdown.asked.is_set(), shutdown.cut_asked.is_set(), shutdown.status) == (True, False, ExitStatus.STOPPED)
    shutdown.on_signal()
    assert shutdown.cut_asked.is_set()


def test_who_was_asked_to_end_keeps_to_the_first_reason() -> None:
    shutdown = Shutdown()
    assert shutdown.ask(ExitStatus.RESTART, 5.0)
    assert not shutdown.ask(ExitStatus.DRAINED)
    assert (shutdown.status, shutdown.drain_s) == (ExitStatus.RESTART, 5.0)


def test_the_statuses_that_supervisors_go_by_stay_what_they_are() -> None:
    assert [(status.name, int(status)) for status in ExitStatus] == [
        ("STOPPED", 0),
        ("FAILED", 1),
        ("WRONG_SETTINGS", 2),
        ("SUPERSEDED", 3),
        ("DRAINED", 4),
        ("RESTART", 5),
    ]
