"""From the monitor's updates to a cluster table. No I/O, no clock.

A watch starts from nothing, so each one fills a table of its own. The table of the watch before stays in force
until the new one is complete: a scheduler that has lost its monitor goes on with the instances it knew. Placements that
it counts and nobody has reported go over into the new one.

So it does with a single instance of which the monitor hears no more, while the directory knows it and frontends are
connected to it: see `controlplane.model.instance_trust`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.decode_message import decode_load_of
from controlplane.load_message import instance_state, load_report
from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.frontend_links import FrontendLinks
from controlplane.model.instance import InstanceDescription, InstanceState, LoadReport
from controlplane.model.instance_trust import FALLBACK, InstanceEvidence, ReportState, untrusted_instances
from controlplane.model.kv_costs import computing_scale, datasheet_kv_costs, with_measured
from controlplane.scheduler import wire
from controlplane.scheduler.rescheduling.decode_loads import DecodeLoads
from mesh.errors import IllegalTransition, ProtocolViolation
from penstock.v1 import monitor_pb2

log = logging.getLogger(__name__)


UNLINKED_S = 10.0
"""An instance without a monitor is forgotten once no frontend was connected to it for so long: one that lost its
connection for a moment gets it back, a dead one has a successor by then."""

MAX_REMEMBERED = 10_000
"""Workers whose latest incarnation is remembered, and incarnations that have a successor."""


@dataclass(slots=True)
class _Unmonitored:
    incarnation_id: str
    linked_s: float
    """When a frontend was last known to be connected to it."""


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
        self.by_last_load: frozenset[str] = frozenset()
        """Instances that are placed on although no monitor has heard of their load of late."""
        self._announced: dict[str, str] = {}
        """Incarnation of each worker in the directory."""
        self._latest: dict[str, str] = {}
        """The incarnation of each worker that the directory named last, whether it is still there or not."""
        self._former: dict[tuple[str, str], None] = {}
        """(instance, incarnation) that have a successor in the directory, oldest first: a monitor that is cut off may
        take one for alive, or for the latest, for long."""
        self._frontends: list[FrontendLinks] = []
        self._unmonitored: dict[str, _Unmonitored] = {}
        """Instances of the table in force of which the monitor hears nothing."""
        self._stale: set[str] = set()
        """Instances of the table in force whose load reports have stopped, by the monitor."""
        self._incoming_stale: set[str] = set()
        self._incoming: ClusterTable | None = None
        self._sequence: int | None = None

    def begin(self) -> None:
        """A watch of a monitor begins: its updates fill a table of their own until it is complete."""
        self._incoming = self._new_table()
        self._incoming_stale = set()
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
            self._take_over(table, now_s)
        if self.synced:
            self.heard_s = now_s
            self.review(now_s)

    def announced(self, instance_id: str, incarnation_id: str) -> None:
        """The mesh's directory knows the instance."""
        self._announced[instance_id] = incarnation_id
        latest = self._latest.pop(instance_id, incarnation_id)
        self._latest[instance_id] = incarnation_id
        if latest != incarnation_id:
            self._former[instance_id, latest] = None
        self._former.pop((instance_id, incarnation_id), None)
        while len(self._latest) > MAX_REMEMBERED:
            del self._latest[next(iter(self._latest))]
        while len(self._former) > MAX_REMEMBERED:
            del self._former[next(iter(self._former))]

    def left(self, instance_id: str, incarnation_id: str) -> bool:
        """The mesh's directory says that the instance has gone. Believed only while no monitor says otherwise;
        True if it was news."""
        if self._announced.get(instance_id) == incarnation_id:
            del self._announced[instance_id]
        known = {i.instance_id: i.incarnation_id for i in self.table.instances()}
        if known.get(instance_id) != incarnation_id or (self.synced and instance_id not in self._unmonitored):
            return False
        self._lose(instance_id, incarnation_id)
        return True

    def linked(self, links: FrontendLinks) -> None:
        """A frontend has come; `review` when its links have changed."""
        self._frontends.append(links)

    def unreachable(self, model: str) -> dict[str, frozenset[str]]:
        """By frontend that has said so: the model's instances that it has no stream to. A frontend that has more than
        one stream to this scheduler, as for a moment after it has lost one, reaches what any of its reports names."""
        snapshot = self.table.snapshot(model)
        found: dict[str, frozenset[str]] = {}
        for links in self._frontends if snapshot is not None else ():
            if links.frontend_id:
                missing = links.unreachable(model, snapshot.instances)  # type: ignore[union-attr]
                found[links.frontend_id] = missing & found.get(links.frontend_id, missing)
        return {frontend_id: missing for frontend_id, missing in found.items() if missing}

    def unlinked(self, links: FrontendLinks) -> None:
        """A frontend has gone: what it said of its links counts no more; `review` then."""
        self._frontends.remove(links)

    def review(self, now_s: float) -> None:
        """Look again whom to believe. Call it often, and when something is known of links or members."""
        if not self._unmonitored and not self._stale and not self.by_last_load:
            return
        for instance_id, known in list(self._unmonitored.items()):
            if self._is_linked(instance_id, known.incarnation_id):
                known.linked_s = now_s
            elif now_s - known.linked_s > UNLINKED_S:
                log.warning("instance lost: nobody is connected to it", extra={"instance_id": instance_id})
                self._lose(instance_id, known.incarnation_id)
        doubtful = self._unmonitored.keys() | self._stale
        stale = untrusted_instances(self._evidence())
        for instance in self.table.instances():
            instance_id = instance.instance_id
            if self.table.is_stale(instance_id) != (instance_id in stale):
                self.table.staled(instance_id, instance.incarnation_id, instance_id in stale)
        self._note_last_load(frozenset(doubtful - stale))

    def _evidence(self) -> list[InstanceEvidence]:
        return [
            InstanceEvidence(
                each.instance_id,
                each.model,
                self.table.state(each.instance_id) is InstanceState.READY,
                ReportState.MISSING
                if each.instance_id in self._unmonitored
                else ReportState.STALE
                if each.instance_id in self._stale
                else ReportState.FRESH,
                self._is_linked(each.instance_id, each.incarnation_id),
            )
            for each in self.table.instances()
        ]

    def _is_linked(self, instance_id: str, incarnation_id: str) -> bool:
        if self._announced.get(instance_id) != incarnation_id:
            return False
        return any(links.connected.get(instance_id) == incarnation_id for links in self._frontends)

    def _note_last_load(self, instance_ids: frozenset[str]) -> None:
        for instance_id in sorted(instance_ids - self.by_last_load):
            log.error(
                "no monitor hears of an instance that frontends are connected to",
                extra={"instance_id": instance_id, "fallback": FALLBACK},
            )
        for instance_id in sorted(self.by_last_load - instance_ids):
            log.warning("an instance is no longer placed on by its last known load", extra={"instance_id": instance_id})
        self.by_last_load = instance_ids

    def _take_over(self, table: ClusterTable, now_s: float) -> None:
        """The table of this watch is complete. Instances that live without its monitor's knowledge stay."""
        self._note_contradicted(table)
        there = {each.instance_id for each in table.instances() if not self._is_former(each)}
        table.take_over(self.table)
        unmonitored = {}
        for each in self.table.instances():
            if each.instance_id not in there and self._is_linked(each.instance_id, each.incarnation_id):
                table.adopt(self.table, each.instance_id)
                unmonitored[each.instance_id] = _Unmonitored(each.incarnation_id, now_s)
        self.table, self._incoming, self.synced = table, None, True
        self._stale, self._unmonitored = self._incoming_stale - unmonitored.keys(), unmonitored
        self.decode_loads.keep(there)

    def _note_contradicted(self, table: ClusterTable) -> None:
        """Take another life of an instance than the one that the directory names and a frontend is connected to for a
        former one. Should it be the next one, the directory names it soon: what the monitor says of it then makes no
        sense here, and the watch begins anew."""
        for known in self.table.instances():
            named = table.incarnation_id(known.instance_id)
            if named not in (None, known.incarnation_id) and self._is_linked(known.instance_id, known.incarnation_id):
                self._former[known.instance_id, named] = None

    def _is_former(self, instance: InstanceDescription) -> bool:
        return (instance.instance_id, instance.incarnation_id) in self._former

    def _lose(self, instance_id: str, incarnation_id: str) -> None:
        self.table.lost(instance_id, incarnation_id)
        self.decode_loads.lost(instance_id)
        self._unmonitored.pop(instance_id, None)
        self._stale.discard(instance_id)

    def _apply(self, table: ClusterTable, update: monitor_pb2.InstanceUpdate, now_s: float) -> None:
        instance_id, incarnation_id = update.instance_id, update.incarnation_id
        if (instance_id, incarnation_id) in self._former and table.incarnation_id(instance_id) != incarnation_id:
            return
        match update.WhichOneof("change"):
            case "load":
                load = load_report(update.load)
                admitted, ended = update.load.admitted_request_ids, update.load.ended_request_ids
                table.reported(instance_id, incarnation_id, load, instance_state(update.load.state), admitted, ended)
                _note_measured(table, instance_id, incarnation_id, load)
            case "kv":
                refused = table.cached(instance_id, incarnation_id, wire.kv_blocks(update.kv))
                self._note_refused(table, refused)
            case "decode":
                self._take_decoding(update, now_s)
            case "joined":
                instance = wire.instance_description(update.joined)
                table.joined(instance)
                if instance.pulls_prefixes or instance.host_store_id:
                    costs = datasheet_kv_costs(
                        instance.kv_token_bytes, pulls=instance.pulls_prefixes, loads=bool(instance.host_store_id)
                    )
                    table.kv_costed(instance_id, incarnation_id, costs)
                self._stale_of(table).discard(instance_id)
                if table is self.table:
                    self._unmonitored.pop(instance_id, None)
                log.info("instance joined", extra={"instance_id": instance_id, "incarnation_id": incarnation_id})
            case "lost":
                self._lost(table, update, now_s)
            case "stale":
                table.staled(instance_id, incarnation_id, update.stale)
                stale = self._stale_of(table)
                stale.add(instance_id) if update.stale else stale.discard(instance_id)
                log.warning(
                    "instance is stale" if update.stale else "instance is fresh", extra={"instance_id": instance_id}
                )
            case other:
                log.error(
                    "a change of this kind is not known here", extra={"instance_id": instance_id, "change": other}
                )

    def _lost(self, table: ClusterTable, update: monitor_pb2.InstanceUpdate, now_s: float) -> None:
        """The monitor hears of it no more; but it may live."""
        instance_id, incarnation_id = update.instance_id, update.incarnation_id
        self.decode_loads.lost(instance_id)
        self._stale_of(table).discard(instance_id)
        if table is self.table and self._is_linked(instance_id, incarnation_id):
            table.unmonitor(instance_id, incarnation_id)
            self._unmonitored[instance_id] = _Unmonitored(incarnation_id, now_s)
            log.warning("instance without a monitor", extra={"instance_id": instance_id, "reason": update.lost.reason})
        else:
            table.lost(instance_id, incarnation_id)
            log.warning("instance lost", extra={"instance_id": instance_id, "reason": update.lost.reason})

    def _stale_of(self, table: ClusterTable) -> set[str]:
        return self._stale if table is self.table else self._incoming_stale

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


def _note_measured(table: ClusterTable, instance_id: str, incarnation_id: str, load: LoadReport) -> None:
    """A pull counts as measured once computing is, too."""
    costs, step_tokens = table.step_costs(instance_id)
    scale = computing_scale(costs, step_tokens, load.pulls.compute_token_ms)
    known = table.kv_costs(instance_id)
    measured = with_measured(
        known,
        pull_token_ms=load.pulls.token_ms * (scale or 0.0),
        load_token_ms=load.host_load_token_ms * (scale or 1.0),
    )
    if measured is not known:
        table.kv_costed(instance_id, incarnation_id, measured)
