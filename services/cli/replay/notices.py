"""What a reader should know before believing the figures of a replay: shortened requests, a late client, errors."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from services.cli.replay.open_loop import ReplayLog
from services.cli.replay.run import TraceSurvey
from simulator.report.report import Report

LATE_MS = 10.0
LATE_SHARE_OF_TTFT = 0.1
MAX_ERROR_KINDS = 5
MAX_ERROR_CHARS = 160


def before_replay(survey: TraceSurvey, max_context_tokens: int | None) -> Iterator[str]:
    """Lines that are known before the first request is sent."""
    yield f"{survey.requests:,} requests within {survey.duration_s:,.1f} s"
    if beyond := survey.beyond(max_context_tokens):
        yield (
            f"WARNING: {beyond:,} of them exceed the model's context of {max_context_tokens:,} tokens "
            "and are shortened to fit, prompt and answer in proportion"
        )


def after_replay(log: ReplayLog, report: Report, concurrency_limit: int) -> Iterator[str]:
    """Lines that are known at the end: how late the client was, and what went wrong."""
    if log.lags_s:
        yield from _lateness(log, report, concurrency_limit)
    if log.other_lengths:
        yield (
            f"WARNING: {log.other_lengths:,} answers are not as long as the trace asks for; the endpoint does not "
            "honour ignore_eos and min_tokens, or its usage is wrong"
        )
    kinds = Counter(outcome.error[:MAX_ERROR_CHARS] for outcome in log.outcomes if outcome.error)
    for error, count in kinds.most_common(MAX_ERROR_KINDS):
        yield f"{count:,} x {error}"
    if len(kinds) > MAX_ERROR_KINDS:
        yield f"and {len(kinds) - MAX_ERROR_KINDS} other kinds of errors"


def _lateness(log: ReplayLog, report: Report, concurrency_limit: int) -> Iterator[str]:
    p99_ms = float(np.percentile(log.lags_s, 99)) * 1000
    yield f"arrival lag of the client: p99 {p99_ms:.1f} ms, largest {max(log.lags_s) * 1000:.1f} ms"
    if log.held_back:
        yield (
            f"WARNING: {log.held_back:,} requests waited for one of {concurrency_limit:,} slots; the loop was not "
            "open then, and the wait is part of their latencies (--concurrency-limit)"
        )
    elif p99_ms > LATE_MS and p99_ms > LATE_SHARE_OF_TTFT * (report.ttft_ms.p50 or 0.0):
        yield (
            "WARNING: the client was the bottleneck: it, or its machine, was too busy to send in time, and its lag is "
            "part of the latencies. Replay from another machine or at a lower --rate-scale"
        )
