"""What must not last."""

from fault_simulation.delays import Delay, Delays


def test_a_delay_counts_only_while_it_lasts() -> None:
    delays, waits = Delays(), Delay("waits in vain", "frontend-0", "requests wait", longest_s=2.0)
    assert list(delays.over([waits], 10.0)) == []
    assert list(delays.over([waits], 12.0)) == []
    assert list(delays.over([], 12.1)) == []
    assert list(delays.over([waits], 12.2)) == []
    assert list(delays.over([waits], 14.3)) == [waits]


def test_delays_are_told_apart() -> None:
    delays = Delays()
    one, other = (Delay("left on a lost worker", "frontend-0", f"worker-{number}", 1.0) for number in range(2))
    assert list(delays.over([one], 0.0)) == []
    assert list(delays.over([one, other], 1.5)) == [one]
