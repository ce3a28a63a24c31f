"""Traces of coding agents: JSONL, a session a line, each request with its prefix as runs of local block names.

A closed loop: the next request of a session goes out `think_time` after the answer before. Sub-agents of a session
have a loop of their own, which starts when they were seen to start.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import numpy as np

from mesh.errors import TraceError
from simulator.traces.block_runs import BlockRuns
from simulator.traces.request import TraceRequest

SESSION_GAP_S = 8.0
"""Mean time between the starts of two sessions, a Poisson process. The trace does not say when its sessions started,
only what happened since; this is our choice, to be changed by --rate-scale."""
_NAMES_OF_A_SESSION = 1 << 32
_Count = Annotated[int, msgspec.Meta(ge=0, lt=_NAMES_OF_A_SESSION)]


class _Entry(msgspec.Struct, frozen=True):
    """A request or a sub-agent."""

    t: float
    """Seconds since the start of what it belongs to."""
    type: str = ""
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    think_time: float | None = None
    api_time: float | None = None
    hash_runs: tuple[tuple[_Count, _Count], ...] = ()
    requests: "tuple[_Entry, ...]" = ()
    agent_id: str = ""


class _Session(msgspec.Struct, frozen=True):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: tuple[_Entry, ...]


def is_agentic_line(line: str) -> bool:
    """Whether `line`, the first of a file, is of this format."""
    try:
        msgspec.json.decode(line, type=_Session)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return True


def parse_agentic(lines: Iterable[str], rng: np.random.Generator) -> Iterator[TraceRequest]:
    """Requests in the order of the times at which they went out in the trace, sessions starting by `rng`.

    Raises TraceError with the line number for a malformed line.
    """
    decoder = msgspec.json.Decoder(_Session)
    requests: list[TraceRequest] = []
    start_s = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            session = decoder.decode(line)
            requests += _requests_of(session, session.requests, session.id, number * _NAMES_OF_A_SESSION, start_s)
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"line {number}: {error}, in {line.strip()[:200]!r}") from error
        start_s += float(rng.exponential(SESSION_GAP_S))
    requests.sort(key=lambda request: request.arrival_s)  # stable: within a session the order stays
    yield from requests


def _requests_of(
    session: _Session, entries: tuple[_Entry, ...], loop: str, first_name: int, start_s: float
) -> Iterator[TraceRequest]:
    before: _Entry | None = None
    for entry in entries:
        if entry.requests:
            agent = f"{loop}/{entry.agent_id}"
            yield from _requests_of(session, entry.requests, agent, first_name, start_s + entry.t)
            continue
        if entry.input_tokens < 1:
            raise ValueError(f"a request at {entry.t} s has no input tokens")
        blocks = BlockRuns(entry.hash_runs).shifted(first_name)
        yield TraceRequest(
            arrival_s=start_s + entry.t,
            input_tokens=entry.input_tokens,
            output_tokens=max(1, entry.output_tokens),
            prefix_block_ids=blocks,
            block_tokens=session.block_size if len(blocks) else 0,
            session_id=loop,
            think_s=None if before is None else _think_s(before, entry),
        )
        before = entry


def _think_s(before: _Entry, entry: _Entry) -> float:
    """Where the trace does not say it: what is left of the time between the two."""
    if entry.think_time is not None:
        return max(0.0, entry.think_time)
    return max(0.0, entry.t - before.t - (before.api_time or 0.0))
