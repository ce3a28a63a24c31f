"""Prefixes that this worker pulls from others: carries out what `PullManager` says."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import grpc

from controlplane.model.prefix_hash import block_hashes, root_hash
from controlplane.model.pull_totals import NO_PULLS, PullTotals
from controlplane.model.request import EngineRequest, PrefixSource
from controlplane.protocols.prefix_pull.target import (
    AskHold,
    CancelFetch,
    EndHold,
    Fetch,
    Fetched,
    Held,
    NotFetched,
    NotHeld,
    PullEnded,
    PullEvent,
    PullFollowed,
    PullInstruction,
    PullManager,
    PullOrdered,
    PullOutcome,
    RequestGone,
    Submit,
    Tick,
)
from engine_worker import wire as worker_wire
from engine_worker.engines.prefix import PrefixEngine
from engine_worker.instance import Instance
from engine_worker.kv.cores import at_core
from engine_worker.prefix_pull import wire
from engine_worker.prefix_pull.metrics import PullMetrics
from engine_worker.prefix_pull.outcome import or_error
from engine_worker.prefix_pull.speed import PromptSpeed
from mesh.errors import InvariantBroken, PenstockError
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Clock, Transport
from mesh.tasks import TaskSet
from penstock.v1 import prefix_pull_pb2, prefix_pull_pb2_grpc

log = logging.getLogger(__name__)

CALL_MARGIN_S = 1.0
"""A call outlives its pull's deadline by this: until then what is being copied has been stopped."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for its prefix."""

    request: EngineRequest
    submit: Callable[[], None]
    is_gone: bool = False
    """Withdrawn, and the manager is about to hear of it."""


@dataclass(slots=True, eq=False)
class _Pull:
    """What is needed of a pull until it ends."""

    prefix: EngineRequest
    call: "asyncio.Task[None]"
    kv_address: str = ""
    kv_token: str = field(default="", repr=False)
    block_ids: tuple[int, ...] = ()
    fetch: "asyncio.Task[int | PenstockError] | None" = None


class PulledPrefixes:
    """Keeps requests back while their prefixes come, and submits each exactly once, unless it is withdrawn."""

    def __init__(
        self,
        instance: Instance,
        engine: PrefixEngine,
        metrics: PullMetrics,
        tasks: TaskSet,
        clock: Clock,
        transport: Transport,
        peers: Callable[[], Awaitable[tuple[Member, ...]]],
        fingerprint: Callable[[], Awaitable[str]],
    ) -> None:
        """`peers`: see `PrefixPuller`. `fingerprint`: see `HeldPrefixes`."""
        own = instance.description
        self.manager = PullManager(f"{own.instance_id}.{own.incarnation_id}")
        self.speed = PromptSpeed()
        self._instance = instance
        self._engine = engine
        self._metrics = metrics
        self._tasks = tasks
        self._clock = clock
        self._transport = transport
        self._peers = peers
        self._fingerprint = fingerprint
        self._waiting: dict[str, _Waiting] = {}
        self._events: deque[PullEvent] = deque()
        """Not handled yet: what an instruction leads to comes behind the instructions that are under way."""
        self._is_handling = False
        self._pulls: dict[str, _Pull] = {}
        self._totals = NO_PULLS

    def __len__(self) -> int:
        """Requests that wait for their prefixes."""
        return sum(not waiting.is_gone for waiting in self._waiting.values())

    @property
    def totals(self) -> PullTotals:
        """See `PrefixPulls`."""
        speed = self.speed
        return replace(
            self._totals, token_ms=speed.pull_token_ms or 0.0, compute_token_ms=speed.compute_token_ms or 0.0
        )

    def awaited(self, request: EngineRequest, source: PrefixSource | None) -> PullOrdered | PullFollowed | None:
        """See `PrefixPulls`."""
        return self._followed(request) if source is None else self._ordered(request, source)

    def begin(self, request: EngineRequest, awaited: PullOrdered | PullFollowed, submit: Callable[[], None]) -> None:
        """See `PrefixPulls`."""
        self._waiting[request.request_id] = _Waiting(request, submit)
        self.handle(awaited)

    def _ordered(self, request: EngineRequest, source: PrefixSource) -> PullOrdered | None:
        """None: it cannot be pulled."""
        block_tokens = self._instance.description.block_tokens
        blocks = min(source.tokens, len(request.prompt_token_ids) - 1) // block_tokens
        if blocks <= 0 or source.instance_id == self._instance.description.instance_id:
            return None
        *_, key = self._chain(request, blocks)
        compute_ms = self.speed.compute_ms(blocks * block_tokens)
        return PullOrdered(request.request_id, source.instance_id, key, blocks, compute_ms, float(source.comes_ms))

    def _followed(self, request: EngineRequest) -> PullFollowed | None:
        """None: nothing of its prompt is being pulled."""
        blocks = self.manager.longest_blocks
        pull_id = self.manager.bringing(self._chain(request, blocks)) if blocks else None
        return None if pull_id is None else PullFollowed(request.request_id, pull_id)

    def _chain(self, request: EngineRequest, blocks: int) -> list[int]:
        """Hashes of the prompt's leading blocks, of so many at most."""
        block_tokens = self._instance.description.block_tokens
        root = root_hash(request.cache_salt, request.adapter_digest)
        token_ids = request.prompt_token_ids[: blocks * block_tokens]
        return block_hashes(token_ids, block_tokens, root, request.media_spans)

    def withdraw(self, request_id: str) -> bool:
        """Nobody wants the request any more. Whether it was kept back here, so that the engine never heard of it."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.is_gone:
            return False
        waiting.is_gone = True
        self.handle(RequestGone(request_id))
        return True

    def tick(self) -> None:
        """Time has passed."""
        if self.manager.pulls:
            self.handle(Tick())

    def handle(self, event: PullEvent) -> None:
        """Tell the manager and carry out what it says, all of it, however one instruction goes."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling, failure = True, None
        try:
            while self._events:
                told = self._events.popleft()
                for instruction in self.manager.handle(told, 1000 * self._clock.now_s()):
                    try:
                        self._carry_out(instruction)
                    # Others wait for what is behind it: it is raised once all is done.
                    except Exception as error:  # noqa: BLE001
                        failure = failure or error
                if isinstance(told, RequestGone):
                    self._waiting.pop(told.request_id, None)
        finally:
            self._is_handling = False
        if failure is not None:
            raise failure

    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself."""
        self.manager.validate()
        for request_id in self._waiting:
            if not self.manager.waits(request_id):
                raise InvariantBroken(f"request {request_id} waits for a pull that is over: {self.manager.pulls}")

    def _carry_out(self, instruction: PullInstruction) -> None:
        match instruction:
            case AskHold():
                prefix = wire.prefix_request(
                    self._waiting[instruction.request_id].request,
                    instruction.pull_id,
                    instruction.blocks,
                    self._instance.description.block_tokens,
                )
                call = self._tasks.spawn(self._ask(instruction, prefix), name=f"hold {instruction.pull_id}")
                self._pulls[instruction.pull_id] = _Pull(prefix, call)
            case Fetch(pull_id, blocks, allowed_ms):
                self._fetch(pull_id, blocks, allowed_ms / 1000)
            case CancelFetch(pull_id):
                if (fetch := self._pulls[pull_id].fetch) is not None:
                    fetch.cancel()
            case EndHold(pull_id):
                self._pulls.pop(pull_id).call.cancel()
            case Submit(request_id):
                waiting = self._waiting.pop(request_id)
                if not waiting.is_gone:
                    waiting.submit()
            case PullEnded():
                self._note_end(instruction)

    async def _ask(self, ask: AskHold, prefix: EngineRequest) -> None:
        """Until the source holds it no more, or `EndHold`."""
        try:
            reason, is_refusal = await self._hold(ask, prefix)
        except PenstockError as error:
            reason, is_refusal = str(error), False
        self.handle(NotHeld(ask.pull_id, reason, is_refusal))

    async def _hold(self, ask: AskHold, prefix: EngineRequest) -> tuple[str, bool]:
        """Returns why nothing is held (any more), and whether the source says so. Raises RpcError."""
        source = next((each for each in await self._peers() if each.member_id == ask.source_id), None)
        if source is None:
            return f"{ask.source_id} is no instance that KV can be pulled from", True
        message = prefix_pull_pb2.HoldRequest(
            pull_id=ask.pull_id,
            request=worker_wire.generate_message(
                prefix, model=self._instance.description.model, deadline_ms=0, epoch=0
            ),
            blocks=ask.blocks,
            wait_ms=round(ask.wait_ms),
            source_incarnation_id=source.incarnation_id,
            model_fingerprint=await self._fingerprint(),
        )
        async with open_channel(self._transport, source.address, source.role) as channel:
            stub = prefix_pull_pb2_grpc.PrefixPullStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Hold(message, timeout=ask.allowed_ms / 1000 + CALL_MARGIN_S)
            try:
                async for answer in call:
                    if not answer.HasField("held"):
                        return answer.refusal.reason, True
                    pull = self._pulls[ask.pull_id]
                    pull.kv_address, pull.kv_token = answer.held.kv_address, answer.held.kv_token
                    pull.block_ids = tuple(answer.held.block_ids)
                    self.handle(Held(ask.pull_id, len(pull.block_ids)))
            except grpc.aio.AioRpcError as error:
                raise rpc_error(error, f"worker {source.member_id}") from error
            finally:
                call.cancel()
        return f"worker {source.member_id} ended the call", False

    def _fetch(self, pull_id: str, blocks: int, allowed_s: float) -> None:
        pull = self._pulls[pull_id]
        pull.fetch = self._tasks.spawn(
            or_error(self._fetch_from, pull_id, pull, blocks, allowed_s), name=f"fetch {pull_id}"
        )
        # Told here and not in the task, which does not even begin if it is cancelled first.
        pull.fetch.add_done_callback(lambda done: self._fetched(pull_id, done))

    async def _fetch_from(self, pull_id: str, pull: _Pull, blocks: int, allowed_s: float) -> int:
        peer, block_ids = at_core(pull.kv_address, pull.block_ids[:blocks], pull.kv_token)
        return await self._engine.prefixes.fetch(pull_id, pull.prefix, peer, block_ids, allowed_s)

    def _fetched(self, pull_id: str, task: "asyncio.Task[int | PenstockError]") -> None:
        if task.cancelled():
            self.handle(NotFetched(pull_id, "it was stopped"))
        elif (error := task.exception()) is not None:
            self.handle(NotFetched(pull_id, f"the engine failed: {error!r}"))
        elif isinstance(outcome := task.result(), PenstockError):
            self.handle(NotFetched(pull_id, str(outcome)))
        else:
            self.handle(Fetched(pull_id, outcome))

    def _note_end(self, ended: PullEnded) -> None:
        outcome = ended.outcome.value
        self._metrics.pulls.labels(outcome).inc()
        self._metrics.seconds.labels(outcome).observe(ended.duration_ms / 1000)
        tokens = ended.blocks * self._instance.description.block_tokens
        self._metrics.tokens.inc(tokens)
        self._metrics.bytes.inc(ended.blocks * self._engine.kv_block_bytes)
        is_pulled = ended.outcome is PullOutcome.PULLED
        if is_pulled:
            self.speed.pulled(tokens, ended.fetch_ms)
        self._totals = PullTotals(
            self._totals.pulled + is_pulled,
            self._totals.computed + (not is_pulled and ended.outcome is not PullOutcome.CANCELLED),
            self._totals.tokens + tokens,
        )
        is_bad = ended.outcome in (PullOutcome.LATE, PullOutcome.FAILED)
        log.log(
            logging.WARNING if is_bad else logging.INFO,
            "a prefix is computed that was to be pulled" if is_bad else "a pull of a prefix ended",
            extra={
                "pull_id": ended.pull_id,
                "source": ended.source_id,
                "outcome": outcome,
                "reason": ended.reason,
                "blocks": ended.blocks,
                "duration_ms": round(ended.duration_ms, 1),
            },
        )
