"""One experiment: an undisturbed run, the same run with a fault in the middle, the comparison."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from mesh.errors import PenstockError, RpcError
from mesh.membership import Directory
from mesh.tasks import TaskSet
from services.cli.chaos.faults import TargetMesh, broken, healed
from services.cli.chaos.pull_counts import PullCounts
from services.cli.chaos.schema import most_tokens, records_schema
from services.cli.chaos.streams import PREFIXES, Client, Question, answered, completion_requests
from services.cli.chaos.traffic import Load, Traffic, sum_of_chunks
from services.cli.chaos.verdict import ChaosReport, Fault, failures_in, judge
from services.cli.connection import mesh_directory, mesh_store
from services.cli.replay.completions import request_head, served_model
from services.cli.replay.pool import ConnectionPool, Endpoint, parse_endpoint
from services.cli.restarting import missing

POLL_S = 0.01
CALL_DEADLINE_S = 10.0
FIRST_TOKEN_ID = 3
"""Below are special tokens."""
DEFAULT_VOCABULARY_TOKENS = 500
MAX_METRICS_BYTES = 4 << 20
NEW_QUESTIONS = 24
"""Different new requests; they are asked in turn."""
NEW_TOKENS = 60
"""Of each of them, or a fifth of a stream's."""
FRESH_EVERY = 4 * PREFIXES
"""Requests after which shared prefixes are in no cache again: instances that have them would have nothing to pull. Not
seconds, in which a slow machine computes none."""


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """The requests that are sent while the mesh is broken."""

    streams: int
    tokens: int
    """Answer length of each stream."""
    rate: float
    """New requests a second."""
    seed: int
    deadline_s: float
    """Deadline of each request."""
    has_schema: bool = False
    """All answers are JSON of a schema, and about as long as said."""
    shared_prefix: int = 0
    """Tokens that prompts begin with alike, by one of a few prefixes."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """One fault, how often or at how many processes, and the traffic under it."""

    fault: Fault
    count: int
    """How many are broken; of what happens to the mesh as a whole, how often."""
    traffic: TrafficPlan
    heal_s: float
    """What the mesh is given to be whole again."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A mesh that is ready to be broken, with questions whose right answers are known."""

    target: TargetMesh
    client: Client
    load: Load


class _Body:
    def __init__(self) -> None:
        self.data = b""

    def on_head(self, status: int, headers: object) -> None: ...

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body."""
        self.data += chunk
        if len(self.data) > MAX_METRICS_BYTES:
            raise ValueError(f"metrics of more than {MAX_METRICS_BYTES} bytes")


@asynccontextmanager
async def prepared(
    plan: TrafficPlan, url: str, store: str | None, mesh: str, say: Callable[[str], None]
) -> AsyncIterator[Prepared]:
    """Asks everything once, undisturbed. Raises PenstockError if the mesh cannot be used."""
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        client = Client(_endpoints(directory, parse_endpoint(url)))
        try:
            pool = client.pools[0]
            model = await served_model(pool, None, "", CALL_DEADLINE_S)
            vocabulary = range(FIRST_TOKEN_ID, model.vocab_size or DEFAULT_VOCABULARY_TOKENS)

            async def questions(count: int, tokens: int, seed: int) -> tuple[Question, ...]:
                schema = records_schema(tokens) if plan.has_schema else None
                limit = tokens if schema is None else most_tokens(schema)
                requests = completion_requests(
                    pool.endpoint, model.name, vocabulary, count, limit, seed, schema, plan.shared_prefix
                )
                return tuple(await answered(client, requests, plan.deadline_s, schema))

            target = TargetMesh(directory, opened, model.name, say)
            say(f"{plan.streams} undisturbed streams of {plan.tokens} tokens on {len(target.workers)} workers")
            streams = await questions(plan.streams, plan.tokens, plan.seed)
            new_tokens = max(1, min(NEW_TOKENS, plan.tokens // 5))
            # Other prompts: none of theirs may be in a cache because a stream has it.
            new = await questions(NEW_QUESTIONS if plan.rate else 0, new_tokens, plan.seed + 1)
            load = Load(streams, new, plan.rate, plan.deadline_s, FRESH_EVERY if plan.shared_prefix else 0)
            yield Prepared(target, client, load)
        finally:
            client.close()


async def run_experiment(
    plan: ChaosPlan, url: str, store: str | None, mesh: str, say: Callable[[str], None]
) -> tuple[ChaosReport, list[str]]:
    """The report, and a line for whatever went wrong. Raises PenstockError if the mesh cannot be used."""
    async with prepared(plan.traffic, url, store, mesh, say) as ready:
        recovered, before = await _recoveries(ready.client), await missing(ready.target.directory)
        pulls = PullCounts(lambda: ready.target.workers)
        await pulls.look()
        engine = ready.target.workers[0].attributes.get("engine", "")
        traffic, watch = Traffic(ready.client, ready.load), TaskSet("pulls")
        try:
            watch.spawn(pulls.keep_looking(), name="pulls")
            lacking = await _disturb(plan, ready, traffic, before)
            await pulls.look()
        finally:
            await watch.cancel()
            await traffic.cancel()
        report = judge(
            traffic.streams,
            traffic.new,
            recovered=max(0, await _recoveries(ready.client) - recovered),
            healed=not lacking,
            engine=engine,
            fault=plan.fault,
            seed=plan.traffic.seed,
            pulled=pulls.pulled,
            pulls_computed=pulls.computed,
        )
        return report, [*failures_in((traffic.streams, traffic.new)), *lacking]


async def _disturb(plan: ChaosPlan, ready: Prepared, traffic: Traffic, before: frozenset[str]) -> list[str]:
    """Wait until the streams together have brought a quarter of their chunks, break the mesh, have streams and new
    requests come until it is over; with shared prefixes new ones come before it, too. A chunk is no measure of
    tokens: those that spell half a character bring none."""
    target, quarter = ready.target, sum_of_chunks(ready.load.streams) // 4
    traffic.start_streams()
    if plan.traffic.shared_prefix:
        traffic.start_new()  # long streams pull at their beginning only
    while traffic.chunks < quarter:  # noqa: ASYNC110  an event for each chunk would cost more
        await asyncio.sleep(POLL_S)
    if traffic.streams.requests == len(ready.load.streams):
        raise RpcError("all streams ended before anything was broken; ask for more --tokens")
    if not plan.traffic.shared_prefix:
        traffic.start_new()
    async with broken(plan.fault, plan.count, target):
        await traffic.end_streams()
    lacking = await healed(target.directory, before, plan.heal_s)
    await traffic.end_new()
    return lacking


def _endpoints(directory: Directory, given: Endpoint) -> list[Endpoint]:
    """All frontends, the given one first: as a balancer in front of them would have them."""
    others = [parse_endpoint(f"http://{each.attributes['http_address']}") for each in directory.members("frontend")]
    return [given, *(other for other in others if (other.host, other.port) != (given.host, given.port))]


async def _recoveries(client: Client) -> int:
    """So far, of all frontends that answer."""
    return sum([await _recoveries_of(pool) for pool in client.pools])


async def _recoveries_of(pool: ConnectionPool) -> int:
    body = _Body()
    try:
        async with asyncio.timeout(CALL_DEADLINE_S):
            await pool.exchange(request_head(pool.endpoint, "GET", "/metrics", "", 0), body)
    except (PenstockError, TimeoutError):
        return 0
    lines = body.data.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("penstock_frontend_recoveries_total"))


def encode_report(report: msgspec.Struct) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)
