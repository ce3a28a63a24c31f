import numpy as np

from simulator.cluster.reporting import seen_report_times_ms


def test_only_the_latest_report_before_each_moment_is_made() -> None:
    moments_ms = np.array([5.0, 38.0, 39.0, 75.0])
    # Reports leave at 3, 13, 23, ... and take 2 ms.
    assert seen_report_times_ms(moments_ms, 10.0, 2.0, 3.0) == [3.0, 33.0, 73.0]


def test_without_an_interval_reports_leave_just_in_time() -> None:
    assert seen_report_times_ms(np.array([1.0, 5.0, 9.0]), 0.0, 4.0, 0.0) == [1.0, 5.0]
