"""What a test that waits for others says when they did not come in time, apart from what is wrong.

A machine that others use can hold a process up for seconds, and no limit is long enough for every machine. So a wait
that runs out is a failure of its own kind: `scripts/run_tests.py` tries that test once more, alone, and counts it as
FLAKY if it passes. A wrong answer, a lost token or a crash is never tried again.
"""

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
import httpx

from mesh.errors import DeadlineExceeded

POLL_S: Final = 0.02
MOST_OF_A_CPU: Final = 0.2
"""How much of one a wait takes at most, so that it does not hold up what it waits for."""


class NotInTime(AssertionError):
    """A wait ran out, or what a test begins from was over before the test could use it."""


def eventually(condition: Callable[[], Any], timeout_s: float, what: str | Callable[[], str]) -> Any:
    """Poll until `condition` is truthy and return it; what another process does offers nothing to await.

    `what` says for what it waits. A function is asked after the wait and can say how things stand then. Raises
    NotInTime.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        began_s = time.monotonic()
        if result := condition():
            return result
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise NotInTime(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(max(POLL_S, (now_s - began_s) * (1 - MOST_OF_A_CPU) / MOST_OF_A_CPU))


def still(holds: bool, what: str) -> None:
    """What a test begins from: something goes on still, and the test came soon enough. Raises NotInTime."""
    if not holds:
        raise NotInTime(f"came too late: {what}")


def ends_within(thread: threading.Thread, limit_s: float) -> None:
    """Wait until a thread has ended, which reads a stream. Raises NotInTime."""
    thread.join(limit_s)
    if thread.is_alive():
        raise NotInTime(f"a stream has not ended within {limit_s:g} s")


def within(took_s: float, limit_s: float, what: str) -> None:
    """What was measured by the real clock took less than that. Raises NotInTime."""
    if took_s >= limit_s:
        raise NotInTime(f"took {took_s:.2f} s, and less than {limit_s:g} s is wanted: {what}")


def is_late(error: BaseException) -> bool:
    """Whether a test failed with nothing but waits that ran out: its own, its client's or its command's."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_late, error.exceptions))
    if isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.UNAVAILABLE:
        # gRPC has waited in vain for a connection, or for the answer to its first bytes.
        return any(words in (error.details() or "") for words in ("timed out", "handshaker shutdown"))
    if isinstance(error, grpc.RpcError):
        return bool(getattr(error, "code", lambda: None)() == grpc.StatusCode.DEADLINE_EXCEEDED)
    if type(error).__name__ == "APITimeoutError":  # openai's, which few tests import
        return True
    late = (NotInTime, TimeoutError, DeadlineExceeded, httpx.TimeoutException, subprocess.TimeoutExpired)
    return isinstance(error, late)
