"""Timelines become small while they still fail."""

from fault_simulation.draws import draw
from fault_simulation.shrink import shrink
from fault_simulation.timeline import Kill, Timeline, Topology


def test_what_is_not_needed_goes() -> None:
    timeline = draw(4)
    faults = (*timeline.faults, Kill(9.0, ("frontend-0", "store"), 8.0))
    tried = 0

    def fails(one: Timeline) -> bool:
        """Where the store is killed for a second or more while request 2 is there."""
        nonlocal tried
        tried += 1
        kills = [fault for fault in one.faults if isinstance(fault, Kill) and "store" in fault.names]
        return any(fault.for_s >= 1.0 for fault in kills) and any(request.number == 2 for request in one.requests)

    smallest = shrink(Timeline(timeline.seed, timeline.topology, timeline.requests, faults), fails)
    assert [request.number for request in smallest.requests] == [2]
    assert smallest.faults == (Kill(9.0, ("store",), 1.0),)
    assert smallest.topology == Topology(phases=("any",), policy="round_robin")
    assert tried <= 150


def test_it_ends_after_so_many_runs() -> None:
    tried = 0

    def fails(one: Timeline) -> bool:
        nonlocal tried
        tried += 1
        return True

    shrink(draw(4), fails, most_runs=5)
    assert tried == 5
