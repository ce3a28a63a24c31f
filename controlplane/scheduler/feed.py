"""From the monitor's updates to a cluster table. No I/O, no clock.

A watch starts from nothing, so each one fills a table of its own. The table of the watch before stays in force
until the new one is complete: a scheduler that has lost its monitor goes on with the instances it knew.
"""

import logging
from collections.abc import Callable

from controlplane.decode_message import decode_load_of
from controlplane.load_message import instance_state, load_report
from controlplane.model.cluster import ClusterLimits, ClusterTable
from controlplane.scheduler import wire
from controlplane.scheduler.rescheduling.decode_loads import DecodeLoads
from mesh.errors import IllegalTransition, ProtocolViolation
from penstock.v1 import monitor_pb2

log = logging.getLogger(__name__)


class ClusterFeed:
    """The table in force, and how far it can be trusted."""

    def __init__(self, limits: ClusterLimits, new_table: Callable[[], ClusterTable] | None = None) -> None:
        """`new_table` makes the empty table of each watch, within the limits."""
        self._new_table = new_table or (lambda: ClusterTable(limits))
        self.table = self._new_table()
        """What placements are made from."""
        self.decode_loads = DecodeLoads()
        """What instances have told of their decoding requests, of whichever watch it was."""
        self.synced = False
        """A watch is under way and the table in force is its table."""
        self.heard_s: float | None = None
        """When the table in force last heard from the monitor; None if it never has."""
        self.refused_blocks_total = 0
        self._incoming: ClusterTable | None = None
        self._sequence: int | None = None

    def begin(self) -> None:
        """A new watch."""
        self._incoming = self._new_table()
        self._sequence = None
        self.synced = False

    def end(self) -> None:
        """The watch is over; the table in force stays as it is."""
        self._incoming = None
        self.synced = False

    def apply(self, update: monitor_pb2.ClusterUpdate, now_s: float) -> None:
        """Take in one message of the watch. Raises `IllegalTransition` where one is missing or makes no sense;
        the watch must then begin anew."""
        if self._sequence is not None and update.sequence != self._sequence + 1:
            raise IllegalTransition(
                f"watch of the monitor: update {update.sequence} came after {self._sequence}; some are missing, "
                "watch again from the start"
            )
        self._sequence = update.sequence
        table = self.table if self.synced else self._incoming
        if table is None:
            raise IllegalTransition("watch of the monitor: an update came outside of a watch")
        for instance in update.instances:
            self._apply(table, instance, now_s)
        if update.synced and not self.synced:
            self.table, self._incoming, self.synced = table, None, True
            self.decode_loads.keep({each.instance_id for each in table.instances()})
        if self.synced:
            self.heard_s = now_s

    def left(self, instance_id: str, incarnation_id: str) -> bool:
        """The mesh's directory says that the instance has gone. Believed only while no monitor says otherwise;
        True if it was news."""
        known = {i.instance_id: i.incarnation_id for i in self.table.instances()}
        if self.synced or known.get(instance_id) != incarnation_id:
            return False
        self.table.lost(instance_id, incarnation_id)
        self.decode_loads.lost(instance_id)
        return True

    def _apply(self, table: ClusterTable, update: monitor_pb2.InstanceUpdate, now_s: float) -> None:
        instance_id, incarnation_id = update.instance_id, update.incarnation_id
        match update.WhichOneof("change"):
            case "load":
                table.reported(
                    instance_id,
                    incarnation_id,
                    load_report(update.load),
                    instance_state(update.load.state),
                    update.load.admitted_request_ids,
                )
            case "kv":
                refused = table.cached(instance_id, incarnation_id, wire.kv_blocks(update.kv))
                self._note_refused(table, refused)
            case "decode":
                self._take_decoding(update, now_s)
            case "joined":
                table.joined(wire.instance_description(update.joined))
                log.info("instance joined", extra={"instance_id": instance_id, "incarnation_id": incarnation_id})
            case "lost":
                table.lost(instance_id, incarnation_id)
                self.decode_loads.lost(instance_id)
                log.warning("instance lost", extra={"instance_id": instance_id, "reason": update.lost.reason})
            case "stale":
                table.staled(instance_id, incarnation_id, update.stale)
                log.warning(
                    "instance is stale" if update.stale else "instance is fresh", extra={"instance_id": instance_id}
                )
            case other:
                log.error(
                    "a change of this kind is not known here", extra={"instance_id": instance_id, "change": other}
                )

    def _take_decoding(self, update: monitor_pb2.InstanceUpdate, now_s: float) -> None:
        try:
            load = decode_load_of(update.decode)
        except ProtocolViolation as error:
            log.error("a report cannot be read", extra={"instance_id": update.instance_id, "error": str(error)})
            return
        self.decode_loads.reported(update.instance_id, update.incarnation_id, load, now_s)

    def _note_refused(self, table: ClusterTable, refused: int) -> None:
        """Loud, but once for a thousand blocks."""
        before, self.refused_blocks_total = self.refused_blocks_total, self.refused_blocks_total + refused
        if before // 1000 != self.refused_blocks_total // 1000 or (refused and not before):
            log.error(
                "the prefix index is full and refuses blocks; raise max_indexed_blocks",
                extra={"max_blocks": table.index.max_blocks, "refused_total": self.refused_blocks_total},
            )
