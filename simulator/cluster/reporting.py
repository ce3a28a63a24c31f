"""When an instance reports, and which of its reports anybody will ever see."""

import numpy as np
from numpy.typing import NDArray


def seen_report_times_ms(
    moments_ms: NDArray[np.float64], interval_ms: float, delay_ms: float, phase_ms: float
) -> list[float]:
    """Times of the reports that are the latest to have arrived at one of the ascending `moments_ms`.

    Reports leave at phase + k x interval, or, with an interval of 0, exactly in time for each moment. One that a
    later report overtakes before anybody places a request changes no decision, so it is never made.
    """
    leave_by_ms = moments_ms - delay_ms
    if interval_ms > 0:
        leave_by_ms = np.floor((leave_by_ms - phase_ms) / interval_ms) * interval_ms + phase_ms
    times: list[float] = np.unique(leave_by_ms[leave_by_ms >= 0]).tolist()
    return times
