"""One replay from start to end: look through the trace, ask the endpoint for its model, send, watch."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from services.cli.replay.completions import CompletionForm, ServedModel, complete, served_model
from services.cli.replay.open_loop import LoopClock, ReplayLog, replay
from services.cli.replay.pool import ConnectionPool, Endpoint
from services.cli.time_columns import time_columns
from simulator.report.outcome import RequestOutcome
from simulator.traces.prompt import TokenRange
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import fit_context
from simulator.traces.source import TraceRecipe, open_trace

LEAD_S = 0.1
"""Between set-up and the first arrival, so that the first request is not late at once."""
FIRST_TOKEN_ID = 3
"""Below it lie the padding, start and end tokens of most vocabularies."""
MODELS_DEADLINE_S = 10.0
REFRESH_S = 0.25
"""Of the progress bar."""
"""Open files that are not connections of the replay."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Options of a replay: trace, endpoint, model, limits."""

    recipe: TraceRecipe
    endpoint: Endpoint
    model: str | None
    api_key: str
    max_requests: int | None
    concurrency_limit: int
    deadline_s: float
    vocabulary: TokenRange
    """Used where the endpoint does not tell the size of its vocabulary."""


@dataclass(frozen=True, slots=True)
class TraceSurvey:
    """Lengths and duration of a trace, found in a first pass over it."""

    duration_s: float
    total_tokens: tuple[int, ...]
    """Prompt and answer of each request."""

    @property
    def requests(self) -> int:
        """Number of requests of the trace."""
        return len(self.total_tokens)

    def beyond(self, max_context_tokens: int | None) -> int:
        """Requests that such a context does not hold; `fit_context` shortens them."""
        return sum(max_context_tokens is not None and tokens > max_context_tokens for tokens in self.total_tokens)


def planned_requests(plan: ReplayPlan, max_context_tokens: int | None) -> Iterator[TraceRequest]:
    """The requests in the form in which they are sent; the same every time. Raises TraceError."""
    requests = islice(open_trace(plan.recipe), plan.max_requests)
    if max_context_tokens is None:
        return requests
    return (fit_context(request, max_context_tokens) for request in requests)


def survey(plan: ReplayPlan) -> TraceSurvey:
    """Read the whole trace once, so that a malformed line is found before the load starts, not in its midst."""
    total_tokens: list[int] = []
    duration_s = 0.0
    for request in planned_requests(plan, None):
        total_tokens.append(request.total_tokens)
        duration_s = request.arrival_s
    return TraceSurvey(duration_s, tuple(total_tokens))


class Replay:
    """A replay under way; its log stays readable after an interruption."""

    def __init__(self, plan: ReplayPlan) -> None:
        self.plan = plan
        self.log = ReplayLog()

    def ask_model(self) -> ServedModel:
        """The model that the replay will use. Raises UnknownModel or RpcError."""

        async def ask() -> ServedModel:
            pool = ConnectionPool(self.plan.endpoint)
            try:
                return await served_model(pool, self.plan.model, self.plan.api_key, MODELS_DEADLINE_S)
            finally:
                pool.close()

        with _runner() as runner:
            return runner.run(ask())

    def run(self, model: ServedModel, requests_total: int) -> bool:
        """Send everything; False if Ctrl-C came in between. Progress goes to the terminal's stderr."""
        try:
            with _runner() as runner:
                runner.run(self._run(model, requests_total))
        except KeyboardInterrupt:
            return False
        return True

    async def _run(self, model: ServedModel, requests_total: int) -> None:
        plan = self.plan
        tokens = TokenRange(FIRST_TOKEN_ID, model.vocab_size) if model.vocab_size else plan.vocabulary
        form = CompletionForm(plan.endpoint, model.name, tokens, plan.recipe.seed, plan.api_key)
        pool = ConnectionPool(plan.endpoint)
        requests = planned_requests(plan, model.max_model_len_tokens)
        clock = LoopClock(LEAD_S)

        async def send(encoded: bytes, arrival_s: float) -> tuple[RequestOutcome, str]:
            return await complete(pool, encoded, arrival_s, clock.now_s, plan.deadline_s)

        watcher = asyncio.create_task(_show_progress(self.log, requests_total))
        try:
            await replay(requests, form.encode, send, clock, plan.concurrency_limit, self.log)
        finally:
            pool.close()
            watcher.cancel()
            await asyncio.wait([watcher])


def _runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _show_progress(log: ReplayLog, requests_total: int) -> None:
    """Draw until cancelled, on stderr and only where that is a terminal.

    Reads the log four times a second instead of being told of every token: drawing must cost the load
    generator next to nothing.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ended, {task.fields[in_flight]} in flight, {task.fields[errors]} errors"),
        *time_columns(),
    )
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=requests_total, in_flight=0, errors=0)
        try:
            while True:
                progress.update(bar, completed=len(log.outcomes), in_flight=log.in_flight, errors=log.errors)
                progress.refresh()
                await asyncio.sleep(REFRESH_S)
        finally:
            progress.update(bar, completed=len(log.outcomes), in_flight=log.in_flight, errors=log.errors)
            progress.refresh()
