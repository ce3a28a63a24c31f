"""Prefixes that others pull from this worker: carries out what `HoldManager` says."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from controlplane.model.request import EngineRequest
from controlplane.protocols.prefix_pull.source import (
    Answer,
    CallEnded,
    EndCall,
    HoldAsked,
    HoldEvent,
    HoldInstruction,
    HoldManager,
    NotPinned,
    Pin,
    Pinned,
    Unpin,
)
from controlplane.protocols.prefix_pull.target import Tick
from engine_worker import wire as worker_wire
from engine_worker.engines.prefix import PrefixEngine
from engine_worker.instance import Instance
from engine_worker.kv.tokens import new_token
from engine_worker.prefix_pull import wire
from engine_worker.prefix_pull.metrics import PullMetrics
from engine_worker.prefix_pull.outcome import or_error
from mesh.errors import ConfigurationError, PenstockError
from mesh.runtime import Clock, Entropy
from mesh.tasks import TaskSet
from penstock.v1 import prefix_pull_pb2, prefix_pull_pb2_grpc

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext


@dataclass(slots=True, eq=False)
class _Call:
    """A peer that wants a prefix held, until it hangs up."""

    request: EngineRequest
    kv_token: str = field(repr=False)
    block_ids: tuple[int, ...] = ()
    """Those that are held."""
    answers: "asyncio.Queue[prefix_pull_pb2.HoldResponse]" = field(default_factory=asyncio.Queue)
    """At most two: what is held, and that it is not any more."""


class HeldPrefixes(prefix_pull_pb2_grpc.PrefixPullServicer):
    """Serves `penstock.v1.PrefixPull`."""

    def __init__(
        self,
        instance: Instance,
        engine: PrefixEngine,
        metrics: PullMetrics,
        tasks: TaskSet,
        clock: Clock,
        entropy: Entropy,
        kv_address: Callable[[], str],
        fingerprint: Callable[[], Awaitable[str]],
    ) -> None:
        """`kv_address`: where peers reach the engine's KV transfer agent. `fingerprint` of the checkpoint; empty where
        the engine has no weights."""
        self.manager = HoldManager()
        self._instance = instance
        self._engine = engine
        self._metrics = metrics
        self._tasks = tasks
        self._clock = clock
        self._entropy = entropy
        self._kv_address = kv_address
        self._fingerprint = fingerprint
        self._calls: dict[str, _Call] = {}
        self._pins: dict[str, asyncio.Task[tuple[int, ...] | PenstockError]] = {}

    async def Hold(
        self, request: prefix_pull_pb2.HoldRequest, context: Context
    ) -> AsyncIterator[prefix_pull_pb2.HoldResponse]:
        """Hold a prefix for as long as the call lasts."""
        hold_id = request.pull_id
        if reason := await self._obstacle(request):
            self._metrics.refused_holds.inc()
            yield wire.refusal(reason)
            return
        call = self._calls[hold_id] = _Call(worker_wire.engine_request(request.request), new_token(self._entropy))
        try:
            self.handle(HoldAsked(hold_id, request.blocks, float(request.wait_ms)))
            is_held = True
            while is_held:
                answer = await call.answers.get()
                is_held = answer.HasField("held")
                yield answer
        finally:
            del self._calls[hold_id]
            self.handle(CallEnded(hold_id))

    def tick(self) -> None:
        """Time has passed."""
        if self.manager.hold_ids:
            self.handle(Tick())

    def handle(self, event: HoldEvent) -> None:
        """Tell the manager and carry out what it says."""
        for instruction in self.manager.handle(event, 1000 * self._clock.now_s()):
            self._carry_out(instruction)

    def _carry_out(self, instruction: HoldInstruction) -> None:
        match instruction:
            case Pin(hold_id, blocks, wait_ms):
                self._pin(hold_id, blocks, wait_ms)
            case Unpin(hold_id):
                self._tasks.spawn(self._unpin(hold_id), name=f"unpin {hold_id}")
            case Answer(hold_id):
                self._metrics.holds.inc()
                if (call := self._calls.get(hold_id)) is not None:
                    call.answers.put_nowait(wire.held(self._kv_address(), call.block_ids, call.kv_token))
            case EndCall(hold_id, reason):
                self._metrics.refused_holds.inc()
                if (call := self._calls.get(hold_id)) is not None:
                    call.answers.put_nowait(wire.refusal(reason))

    def _pin(self, hold_id: str, blocks: int, wait_ms: float) -> None:
        call = self._calls[hold_id]
        request = call.request
        # Only what a request here is about to compute is worth waiting for.
        wait_s = wait_ms / 1000 if self._is_computing(request) else 0.0
        pinning = or_error(self._engine.prefixes.hold, hold_id, request, blocks, wait_s, call.kv_token)
        task = self._tasks.spawn(pinning, name=f"pin {hold_id}")
        self._pins[hold_id] = task
        task.add_done_callback(lambda done: self._pinned(hold_id, done))

    def _pinned(self, hold_id: str, task: "asyncio.Task[tuple[int, ...] | PenstockError]") -> None:
        if task.cancelled():
            return  # it was let go meanwhile
        if task.exception() is not None:  # unheard, the peer would wait for its deadline
            self.handle(NotPinned(hold_id, f"the engine failed: {task.exception()!r}"))
        elif isinstance(outcome := task.result(), PenstockError):
            self.handle(NotPinned(hold_id, str(outcome)))
        else:
            call = self._calls.get(hold_id)
            if call is not None:
                call.block_ids = outcome
            self.handle(Pinned(hold_id, len(outcome)))

    async def _unpin(self, hold_id: str) -> None:
        pin = self._pins.pop(hold_id, None)
        if pin is not None and not pin.done():
            pin.cancel()
            await asyncio.gather(pin, return_exceptions=True)
        try:
            self._engine.prefixes.let_go(hold_id)
        except PenstockError as error:
            log.warning("a prefix cannot be let go", extra={"hold_id": hold_id, "reason": str(error)})

    async def _obstacle(self, request: prefix_pull_pb2.HoldRequest) -> str:
        """Why nothing can be held for a peer; empty if it can."""
        own = self._instance.description
        if request.source_incarnation_id != own.incarnation_id:
            return f"{own.instance_id} was restarted since it was announced: incarnation {own.incarnation_id}"
        if request.request.model != own.model:
            return f"{own.instance_id} serves {own.model!r}, not {request.request.model!r}"
        try:
            if request.model_fingerprint != await self._fingerprint():
                return f"{own.instance_id} serves other weights under the name of {own.model!r}"
        except ConfigurationError as error:
            return str(error)
        if request.pull_id in self._calls:
            return f"{request.pull_id} holds a prefix already"
        return ""

    def _is_computing(self, wanted: EngineRequest) -> bool:
        """Whether a request here has yet to compute what is wanted."""
        prefix = wanted.prompt_token_ids[:-1]
        return any(
            not tracked.started
            and tracked.request.prompt_token_ids[: len(prefix)] == prefix
            and tracked.request.cache_salt == wanted.cache_salt
            and tracked.request.adapter_digest == wanted.adapter_digest
            for tracked in self._instance.table.live()
        )
