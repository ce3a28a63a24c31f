"""Requests that come to this worker: carries out what `TargetManager` says."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from controlplane.protocols.migration.messages import FinalMessage, Offer, Round, ToTarget
from controlplane.protocols.migration.target import (
    Activate,
    Arrived,
    Discard,
    NotArrived,
    NotReserved,
    Pull,
    Reserve,
    Reserved,
    Send,
    TargetInstruction,
    TargetState,
    Tick,
)
from controlplane.protocols.migration.target_manager import (
    Answer,
    Answered,
    ArrivalEnded,
    ConnectionEnded,
    Do,
    Received,
    Superseded,
    TargetManager,
    TargetManagerEvent,
    TargetManagerInstruction,
)
from engine_worker.coordinator import wire
from engine_worker.coordinator.metrics import MigrationMetrics
from engine_worker.engines.movable import MovableEngine
from engine_worker.instance import Instance
from engine_worker.kv.cores import at_core
from mesh.errors import PenstockError
from mesh.tasks import TaskSet
from penstock.v1 import migration_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Connection:
    kv_address: str
    """Of the source's transfer agent."""
    send: Callable[[migration_pb2.TargetMessage], None]


@dataclass(slots=True, eq=False)
class _Incoming:
    """What is needed of a migration until it ends."""

    offer: Offer
    model: str
    deadline_s: float | None
    kv_address: str
    kv_token: str = field(repr=False)
    predicted_end_tokens: int | None
    predicted_band_tokens: tuple[int, int] | None
    named: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Block ids at the source and the generated tokens that they cover, by first block and count."""
    pulling: asyncio.Task[None] | None = None
    blocks: int = 0
    """That are here."""


class IncomingMigrations:
    """Reserves, pulls, activates and discards in the engine; answers on the streams of the sources."""

    def __init__(
        self,
        instance: Instance,
        engine: MovableEngine,
        metrics: MigrationMetrics,
        tasks: TaskSet,
        clock: Callable[[], float],
    ) -> None:
        self.manager = TargetManager()
        self._instance = instance
        self._engine = engine
        self._metrics = metrics
        self._tasks = tasks
        self._clock = clock
        self._connection_ids = count(1)
        self._connections: dict[str, _Connection] = {}
        self._incoming: dict[str, _Incoming] = {}
        """By migration; those that have not ended."""

    def connect(self, hello: migration_pb2.SourceHello, send: Callable[[migration_pb2.TargetMessage], None]) -> str:
        """A source has opened its stream; returns the name of the connection."""
        name = f"{hello.instance_id}.{hello.incarnation_id}.{next(self._connection_ids)}"
        self._connections[name] = _Connection(hello.kv_address, send)
        return name

    def disconnect(self, connection: str) -> None:
        """Its stream has ended."""
        del self._connections[connection]
        self.handle(ConnectionEnded(connection))

    def receive(self, connection: str, message: migration_pb2.SourceMessage) -> None:
        """Raises `ProtocolViolation` for what is no message about a migration."""
        if not message.HasField("offer"):
            said = wire.to_target(message)
            self._keep_block_ids(said, message)
            self.handle(Received(connection, said))
            return
        offer, request = wire.offer_of(message.offer), message.offer.request
        deadline_s = self._clock() + request.deadline_ms / 1000 if request.deadline_ms else None
        kv_address, predicted = self._connections[connection].kv_address, message.offer.predicted_end_tokens or None
        low, high = message.offer.predicted_low_end_tokens, message.offer.predicted_high_end_tokens
        self._incoming.setdefault(
            offer.migration_id,
            _Incoming(
                offer,
                request.model,
                deadline_s,
                kv_address,
                message.offer.kv_token,
                predicted,
                (low, high) if high else None,
            ),
        )
        self.handle(Received(connection, offer))
        if not self.manager.is_running(offer.migration_id):
            self._incoming.pop(offer.migration_id, None)

    def supersede(self, request_id: str, epoch: int) -> bool:
        """See `Instance.supersede`: whether the request moves to here, or did so a moment ago."""
        self.handle(Superseded(request_id, epoch))
        return self.manager.moved_lately(request_id)

    def tick(self) -> None:
        """Time has passed."""
        self.handle(Tick())

    def handle(self, event: TargetManagerEvent) -> None:
        """Tell the manager and carry out what it says."""
        for instruction in self.manager.handle(event, 1000 * self._clock()):
            self._carry_out(instruction)

    def _keep_block_ids(self, said: ToTarget, message: migration_pb2.SourceMessage) -> None:
        """A pull of the blocks that this message is about needs them."""
        incoming = self._incoming.get(said.migration_id)
        if incoming is None:
            return
        if isinstance(said, Round):
            block_ids, covered = tuple(message.round.block_ids), tuple(message.round.emitted_token_ids)
        elif isinstance(said, FinalMessage):
            generated_tokens = max(0, said.computed_tokens - len(incoming.offer.request.prompt_token_ids))
            block_ids, covered = tuple(message.final_message.block_ids), said.emitted_token_ids[:generated_tokens]
        else:
            return
        incoming.named[said.first_block, said.block_count] = (block_ids, covered)

    def _carry_out(self, instruction: TargetManagerInstruction) -> None:
        match instruction:
            case Answer(connection, message):
                if connection in self._connections:
                    self._connections[connection].send(wire.target_message(message))
            case Do(migration_id, step):
                self._do(migration_id, step)
            case ArrivalEnded(migration_id, state, duration_ms, story):
                incoming = self._incoming.pop(migration_id)
                blocks = incoming.blocks if state is TargetState.COMMITTED else 0
                kv_bytes = blocks * self._engine.kv_block_bytes
                self._metrics.ended("in", state.value, blocks, kv_bytes, duration_ms / 1000)
                request_id = incoming.offer.request.request_id
                log.info("a migration to here ended", extra={"request_id": request_id, "story": story})

    def _do(self, migration_id: str, step: TargetInstruction) -> None:
        incoming = self._incoming.get(migration_id)
        match step:
            case Reserve() if incoming is not None:
                self._tasks.spawn(self._reserve(incoming), name=f"reserve {migration_id}")
            case Pull(first_block, block_count) if incoming is not None:
                named = incoming.named[first_block, block_count]
                incoming.pulling = self._tasks.spawn(
                    self._pull(incoming, first_block, *named), name=f"pull {migration_id}"
                )
            case Activate(emitted_token_ids, computed_tokens) if incoming is not None:
                self._activate(incoming, emitted_token_ids, computed_tokens)
            case Discard():
                pulling = None if incoming is None else incoming.pulling
                self._tasks.spawn(self._discard(migration_id, pulling), name=f"discard {migration_id}")
            case Reserve() | Pull() | Activate() | Send():
                raise AssertionError(f"{step} for migration {migration_id}, which has ended")

    async def _reserve(self, incoming: _Incoming) -> None:
        migration_id = incoming.offer.migration_id
        if (obstacle := self._obstacle(incoming)) is not None:
            self.handle(Answered(migration_id, NotReserved(obstacle)))
            return
        try:
            await self._engine.reserve(migration_id, incoming.offer.request)
        except PenstockError as error:
            self.handle(Answered(migration_id, NotReserved(str(error))))
        except Exception as error:
            log.exception("room for a migration could not be made", extra={"migration_id": migration_id})
            self._engine.discard(migration_id)
            self.handle(Answered(migration_id, NotReserved(f"the engine failed: {error!r}")))
        else:
            self.handle(Answered(migration_id, Reserved()))

    async def _pull(
        self, incoming: _Incoming, first_block: int, block_ids: tuple[int, ...], covered: tuple[int, ...]
    ) -> None:
        migration_id, deadline_s = incoming.offer.migration_id, self.manager.limits.live.round_ms / 1000
        try:
            if block_ids:
                peer, ids = at_core(incoming.kv_address, block_ids, incoming.kv_token)
                await self._engine.pull(migration_id, peer, first_block, ids, covered, deadline_s)
        except PenstockError as error:
            self.handle(Answered(migration_id, NotArrived(str(error))))
            return
        except Exception as error:
            # What the engine's memory raises may be anything; unheard, the blocks would be held for ever.
            log.exception("blocks could not be pulled", extra={"migration_id": migration_id})
            self.handle(Answered(migration_id, NotArrived(f"the engine failed: {error!r}")))
            return
        # The last of them make the request this worker's: nothing may happen between this look and that.
        if (obstacle := self._obstacle(incoming)) is not None:
            self.handle(Answered(migration_id, NotArrived(obstacle)))
            return
        incoming.blocks = first_block + len(block_ids)
        self.handle(Answered(migration_id, Arrived(first_block, len(block_ids))))

    def _obstacle(self, incoming: _Incoming) -> str | None:
        """Why the request cannot be owned here."""
        offer = incoming.offer
        return self._instance.import_obstacle(offer.request, incoming.model, offer.frontend_id)

    def _activate(self, incoming: _Incoming, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        offer = incoming.offer
        request = replace(offer.request, emitted_token_ids=emitted_token_ids)
        self._instance.take_over(request, offer.frontend_id, epoch=offer.epoch, deadline_s=incoming.deadline_s)
        if incoming.predicted_end_tokens is not None:
            end, band = incoming.predicted_end_tokens, incoming.predicted_band_tokens
            self._instance.table.predicted(request.request_id, 0, end, band)
        try:
            self._engine.activate(offer.migration_id, emitted_token_ids, computed_tokens)
        except Exception as error:
            # The source gives it up in any case: the frontend recovers it.
            log.exception("a request that moved here cannot be run", extra={"request_id": request.request_id})
            self._engine.discard(offer.migration_id)
            self._instance.give_up(request.request_id, f"the engine could not run it: {error}")

    async def _discard(self, migration_id: str, pulling: asyncio.Task[None] | None) -> None:
        """The reserved blocks are free only when no transfer writes into them any more."""
        if pulling is not None:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
        self._engine.discard(migration_id)
