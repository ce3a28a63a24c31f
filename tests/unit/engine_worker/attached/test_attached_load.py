"""Whose the requests are that a server counts: those of its other clients, or the mesh's that come and go meanwhile."""

from engine_worker.engines.attached.load import COUNTED_AFTER_S, AttachedLoad
from engine_worker.engines.attached.wire import ServerMetrics


def told(running: int, asked_s: float, waiting: int = 0) -> ServerMetrics:
    return ServerMetrics(running_requests=running, waiting_requests=waiting, asked_s=asked_s)


def requests(load: AttachedLoad) -> int:
    report = load.report()
    return report.running_requests + report.queued_requests


def test_requests_of_others_come_and_go() -> None:
    load = AttachedLoad(100, 16)
    load.measured(told(3, asked_s=1.0, waiting=2))
    assert (load.report().running_requests, load.report().queued_requests) == (3, 2)
    load.submitted("ours", 10, 0)
    load.produced("ours", 1, now_s=1.1)
    load.measured(told(4, asked_s=2.0))
    assert requests(load) == 4
    load.measured(told(1, asked_s=3.0))
    assert requests(load) == 1


def test_one_that_ended_while_the_server_was_asked_is_nobody_else_s() -> None:
    load = AttachedLoad(100, 16)
    load.submitted("ours", 10, 0)
    load.produced("ours", 1, now_s=1.0)
    load.ended("ours", now_s=2.0)
    load.measured(told(1, asked_s=1.9))
    assert requests(load) == 0
    load.measured(told(1, asked_s=2.0 + COUNTED_AFTER_S / 2))
    assert requests(load) == 0, "it is counted for a moment after its last token"
    load.measured(told(1, asked_s=2.0 + COUNTED_AFTER_S * 2))
    assert requests(load) == 1, "somebody else's"


def test_one_that_has_not_reached_the_server_takes_none_of_the_others_away() -> None:
    load = AttachedLoad(100, 16)
    load.measured(told(5, asked_s=1.0))
    load.submitted("ours", 10, 0)
    load.measured(told(5, asked_s=1.2))
    assert requests(load) == 6
    load.measured(told(5, asked_s=1.4, waiting=1))
    assert requests(load) == 6
    load.produced("ours", 1, now_s=1.5)
    load.measured(told(5, asked_s=1.6))
    assert requests(load) == 5, "ours is among them"


def test_others_are_seen_beside_requests_that_come_and_go() -> None:
    load = AttachedLoad(100, 16)
    for number in range(100):
        now_s = number * 0.25
        for index in range(10):
            load.submitted(f"{number}-{index}", 10, 0)
            load.produced(f"{number}-{index}", 1, now_s)
        load.measured(told(14, asked_s=now_s))
        assert requests(load) == 14, "four others, of whom it knows from the start"
        for index in range(10):
            load.ended(f"{number}-{index}", now_s + 0.1)
