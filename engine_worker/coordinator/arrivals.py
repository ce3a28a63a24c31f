"""All migrations to this worker, those that ended a short while ago included."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.protocols.migration.messages import Failed, Refuse
from engine_worker.coordinator import wire
from engine_worker.coordinator.incoming import IncomingMigration
from engine_worker.coordinator.workplace import Workplace
from mesh.errors import ProtocolViolation
from penstock.v1 import migration_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One stream of one incarnation of another worker."""

    instance_id: str
    incarnation_id: str
    kv_address: str
    send: Callable[[migration_pb2.TargetMessage], None]


class Arrivals:
    """Takes offers within the bounds, and remembers how each migration ended for as long as its source may ask."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace
        self._migrations: dict[str, tuple[Source, IncomingMigration]] = {}
        """By id, in the order of their offers."""

    @property
    def running(self) -> int:
        """Migrations that have not ended."""
        return sum(not incoming.is_over for _, incoming in self._migrations.values())

    def remembers(self, request_id: str) -> bool:
        """Whether the request moves here or did so a short while ago."""
        return any(incoming.offer.request.request_id == request_id for _, incoming in self._migrations.values())

    def receive(self, source: Source, message: migration_pb2.SourceMessage) -> None:
        """Raises `ProtocolViolation` for what is no message about a migration."""
        kind = message.WhichOneof("message")
        if kind not in ("offer", "round", "hand_over", "abort"):
            raise ProtocolViolation(f"after its hello the source of a migration must not send {kind}")
        migration_id = getattr(message, kind).migration_id
        known = self._migrations.get(migration_id)
        if known is not None:
            known[1].receive(message)
        elif kind == "offer":
            self._take(source, message.offer)
        else:
            # It never was here: a migration is remembered for longer than its source asks for it.
            source.send(wire.target_message(Failed(migration_id, "this migration is unknown here")))

    def source_lost(self, source: Source) -> None:
        """Its stream has ended."""
        for of_source, incoming in list(self._migrations.values()):
            if of_source is source:
                incoming.source_lost()

    def tick(self) -> None:
        """Time has passed."""
        now_s, keep_s = self._workplace.clock(), self._workplace.settings.tombstone_s
        for migration_id, (_, incoming) in list(self._migrations.items()):
            if not incoming.is_over:
                incoming.tick()
            elif incoming.ended_s is not None and now_s - incoming.ended_s >= keep_s:
                del self._migrations[migration_id]

    def _take(self, source: Source, offer: migration_pb2.MigrationOffer) -> None:
        settings, obstacle = self._workplace.settings, self._workplace.instance.transfer_obstacle
        if obstacle:
            reason = f"no request can be moved to here: {obstacle}"
            source.send(wire.target_message(Refuse(offer.migration_id, reason)))
            return
        if self.running >= settings.arriving or len(self._migrations) >= settings.tombstones:
            reason = f"{self.running} migrations to here are under way, {settings.arriving} are possible; try again"
            source.send(wire.target_message(Refuse(offer.migration_id, reason)))
            return
        incoming = IncomingMigration(offer, source.kv_address, source.send, self._workplace)
        self._migrations[offer.migration_id] = (source, incoming)
        incoming.start()
