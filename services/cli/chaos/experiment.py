"""One experiment: an undisturbed run, the same run with a fault in the middle, the comparison."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from mesh.errors import RpcError
from mesh.membership import Directory, Member
from services.cli.chaos.faults import inject, requests_of, victims, woken_at_the_end
from services.cli.chaos.streams import Stream, completion_requests, run_stream, undisturbed
from services.cli.chaos.verdict import Answer, ChaosReport, Fault, judge
from services.cli.connection import mesh_directory, mesh_store
from services.cli.replay.completions import request_head, served_model
from services.cli.replay.pool import ConnectionPool, parse_endpoint

POLL_S = 0.01
CALL_DEADLINE_S = 10.0
FIRST_TOKEN_ID = 3
"""Below are special tokens."""
DEFAULT_VOCABULARY_TOKENS = 500
MAX_METRICS_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """What to do."""

    fault: Fault
    victims: int
    streams: int
    tokens: int
    seed: int
    deadline_s: float
    """For a single run of all streams."""


class _Body:
    def __init__(self) -> None:
        self.data = b""

    def on_head(self, status: int, headers: object) -> None:
        """Nothing to look at."""

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body."""
        self.data += chunk
        if len(self.data) > MAX_METRICS_BYTES:
            raise ValueError(f"metrics of more than {MAX_METRICS_BYTES} bytes")


async def run_experiment(
    plan: ChaosPlan, url: str, store: str | None, mesh: str, say: Callable[[str], None]
) -> tuple[ChaosReport, list[str]]:
    """The report and the errors of streams. Raises PenstockError if the mesh cannot be used."""
    pool = ConnectionPool(parse_endpoint(url))
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        try:
            return await _run(plan, pool, directory, say)
        finally:
            pool.close()


async def _run(
    plan: ChaosPlan, pool: ConnectionPool, directory: Directory, say: Callable[[str], None]
) -> tuple[ChaosReport, list[str]]:
    model = await served_model(pool, None, "", CALL_DEADLINE_S)
    vocabulary = range(FIRST_TOKEN_ID, model.vocab_size or DEFAULT_VOCABULARY_TOKENS)
    requests = completion_requests(pool.endpoint, model.name, vocabulary, plan.streams, plan.tokens, plan.seed)
    workers = [one for one in directory.members("worker") if one.attributes.get("model") == model.name]
    say(f"{plan.streams} undisturbed streams of {plan.tokens} tokens on {len(workers)} workers")
    expected = await undisturbed(pool, requests, plan.deadline_s)
    recovered = await _recoveries(pool)
    streams = [Stream(asyncio.get_running_loop().time) for _ in requests]
    running = [
        asyncio.ensure_future(run_stream(pool, request, stream, plan.deadline_s))
        for request, stream in zip(requests, streams, strict=True)
    ]
    try:
        await _disturb(plan, workers, streams, expected, running, say)
    finally:
        for task in running:
            task.cancel()
    report = judge(
        [stream.answer() for stream in streams],
        expected,
        recovered=await _recoveries(pool) - recovered,
        engine=workers[0].attributes.get("engine", ""),
        fault=plan.fault,
        seed=plan.seed,
    )
    return report, _stories(streams, expected)


async def _disturb(
    plan: ChaosPlan,
    workers: list[Member],
    streams: list[Stream],
    expected: list[Answer],
    running: Sequence["asyncio.Future[None]"],
    say: Callable[[str], None],
) -> None:
    """Wait until the streams together have brought a quarter of their chunks, break the workers that have most of
    them, wait for the end. A chunk is no measure of tokens: those that spell half a character bring none."""
    quarter = sum(right.chunks for right in expected) // 4
    while sum(stream.chunks for stream in streams) < quarter:
        if all(task.done() for task in running):
            break
        await asyncio.sleep(POLL_S)
    requests = await requests_of(workers)
    if all(task.done() for task in running):
        raise RpcError("all streams ended before anything was broken; ask for more --tokens")
    chosen = victims(workers, requests, plan.victims)
    with woken_at_the_end(plan.fault, chosen):
        for worker in chosen:
            say(f"{plan.fault} {worker.member_id}, where {requests[worker.member_id]} streams run")
            await inject(plan.fault, worker)
        await asyncio.gather(*running)


async def _recoveries(pool: ConnectionPool) -> int:
    """So far, of the frontend behind the endpoint."""
    body = _Body()
    async with asyncio.timeout(CALL_DEADLINE_S):
        await pool.exchange(request_head(pool.endpoint, "GET", "/metrics", "", 0), body)
    lines = body.data.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("penstock_frontend_recoveries_total"))


def _stories(streams: list[Stream], expected: list[Answer]) -> list[str]:
    """One line for each stream that went wrong."""
    stories = []
    for number, (stream, right) in enumerate(zip(streams, expected, strict=True)):
        answer = stream.answer()
        if not answer.finished or (answer.text, answer.tokens) != (right.text, right.tokens):
            why = stream.error or f"{answer.tokens} tokens instead of {right.tokens}, or other ones"
            stories.append(f"stream {number}, begun on {stream.instance_id}: {why}")
    return stories


def encode_report(report: ChaosReport) -> bytes:
    """As JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)
