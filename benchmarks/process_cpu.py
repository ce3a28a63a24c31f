"""The CPU time of another process."""

import time


def process_cpu_s(pid: int) -> float:
    """User and system time of all threads so far. To the nanosecond, where /proc (and psutil) counts in ticks of 10 ms:
    the kernel keeps a clock for each process, whose number is made of the pid (clock_getcpuclockid(3)). Raises OSError
    if there is no such process."""
    return time.clock_gettime((~pid << 3) | 2)
