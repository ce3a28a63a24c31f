"""What the monitor knows of the instances: reports in, changes out. No I/O, no clock.

Messages of the contract serve as values here: the monitor passes them on unread wherever it can.
"""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from mesh.invariants import invariants
from penstock.v1 import monitor_pb2, worker_pb2

MAX_ADMITTED = 1024
"""Of one instance: more than it can admit while a watcher changes its monitor."""
USUAL_INTERVAL_S = 0.05
"""Between two reports of a busy worker that is not asked to wait longer."""
PIECE_BLOCKS = 4096
"""Block hashes in one message of an instance's state: 36 KB."""


class ReportedInstance:
    """One report stream's instance. Only the registry writes to it."""

    def __init__(self, description: worker_pb2.InstanceDescription, now_s: float) -> None:
        self.description = description
        self.load: worker_pb2.LoadReport | None = None
        self.load_s = now_s
        """When the last load report came; before the first, when the instance joined."""
        self.stale = False
        self.admitted: dict[str, bool] = {}
        """Requests that it reported as admitted of late, oldest first, and whether they have ended since: who begins to
        watch counts those that it knows as placed no longer as on their way."""
        self.blocks: set[int] = set()
        """In its prefix cache."""
        self.host_blocks: set[int] = set()
        """That it could load from its host's memory."""
        self.disk_blocks: set[int] = set()
        """That it could load from its host's disk."""
        self.superseded = False
        """A newer stream speaks for the instance now; this one has no say any more."""

    @property
    def tiers(self) -> "tuple[tuple[monitor_pb2.KvTier, set[int]], ...]":
        """All its blocks, by where they are."""
        return (
            (monitor_pb2.KV_TIER_ENGINE, self.blocks),
            (monitor_pb2.KV_TIER_HOST, self.host_blocks),
            (monitor_pb2.KV_TIER_DISK, self.disk_blocks),
        )

    @property
    def instance_id(self) -> str:
        """The instance's name in the mesh."""
        return self.description.instance_id

    def update(self, **change: Any) -> monitor_pb2.InstanceUpdate:
        """A change of this instance, as watchers are told it."""
        return monitor_pb2.InstanceUpdate(
            instance_id=self.description.instance_id,
            incarnation_id=self.description.incarnation_id,
            **change,
        )


class InstanceRegistry:
    """All instances that report now. Every event returns the changes that watchers must be told, in order."""

    def __init__(self, stale_s: float, max_reports_per_s: float = inf) -> None:
        """`max_reports_per_s`: of all instances together."""
        self._stale_s = stale_s
        self._max_reports_per_s = max_reports_per_s
        self._instances: dict[str, ReportedInstance] = {}

    def instances(self) -> list[ReportedInstance]:
        """In the order of joining."""
        return list(self._instances.values())

    @property
    def report_interval_ms(self) -> int:
        """What each instance is asked to leave between two load reports; 0: what it likes.

        Between reports whoever places requests adds what it has placed itself. What it does not see are steps and ends,
        of which a quarter of a second brings 10 to one request that decodes, and one end to 25 that run for 6 s.
        """
        interval_s = min(len(self._instances) / self._max_reports_per_s, self._stale_s / 4)
        return round(1000 * interval_s) if interval_s > USUAL_INTERVAL_S else 0

    def get(self, instance_id: str) -> ReportedInstance | None:
        """The instance of that id, if it reports."""
        return self._instances.get(instance_id)

    def joined(
        self, description: worker_pb2.InstanceDescription, now_s: float
    ) -> tuple[ReportedInstance, list[monitor_pb2.InstanceUpdate]]:
        """A report stream has begun. An older stream of the same instance is superseded."""
        changes = []
        older = self._instances.get(description.instance_id)
        if older is not None:
            older.superseded = True
            changes = self.lost(older, "a newer stream of the instance has begun")
        instance = ReportedInstance(description, now_s)
        self._instances[description.instance_id] = instance
        return instance, [*changes, instance.update(joined=description)]

    def lost(self, instance: ReportedInstance, reason: str) -> list[monitor_pb2.InstanceUpdate]:
        """The report stream has ended, and with it the instance."""
        if self._instances.get(instance.instance_id) is not instance:
            return []
        del self._instances[instance.instance_id]
        return [instance.update(lost=monitor_pb2.InstanceLost(reason=reason))]

    def loaded(
        self, instance: ReportedInstance, load: worker_pb2.LoadReport, now_s: float
    ) -> list[monitor_pb2.InstanceUpdate]:
        """A load report has come."""
        instance.load = load
        instance.admitted.update(dict.fromkeys(load.admitted_request_ids, False))
        instance.admitted.update((each, True) for each in load.ended_request_ids if each in instance.admitted)
        while len(instance.admitted) > MAX_ADMITTED:
            del instance.admitted[next(iter(instance.admitted))]
        instance.load_s = now_s
        changes = [instance.update(load=load)]
        if instance.stale:
            instance.stale = False
            changes.append(instance.update(stale=False))
        return changes

    def decoding(
        self, instance: ReportedInstance, report: monitor_pb2.DecodeReport
    ) -> list[monitor_pb2.InstanceUpdate]:
        """The instance has told of its decoding requests. Passed on and not kept: the next report comes within an
        interval, and an old one would only mislead."""
        return [instance.update(decode=report)]

    def cached(self, instance: ReportedInstance, change: monitor_pb2.KvUpdate) -> list[monitor_pb2.InstanceUpdate]:
        """The instance's prefix cache, or what it could load from its host, has changed."""
        blocks = next((blocks for tier, blocks in instance.tiers if tier == change.tier), set[int]())
        if change.cleared:
            blocks.clear()
        blocks.difference_update(change.removed)
        blocks.update(change.stored)
        return [instance.update(kv=change)]

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        for instance_id, instance in self._instances.items():
            assert instance.instance_id == instance_id, "each instance by its own id"
            assert not instance.superseded, f"a newer stream speaks for {instance_id}"
            assert len(instance.admitted) <= MAX_ADMITTED, (
                f"admissions that are remembered of {instance_id} are bounded"
            )

    def tick(self, now_s: float) -> list[monitor_pb2.InstanceUpdate]:
        """Find the instances whose load reports have stopped."""
        changes = []
        for instance in self._instances.values():
            if not instance.stale and now_s - instance.load_s > self._stale_s:
                instance.stale = True
                changes.append(instance.update(stale=True))
        return changes

    def describe(self, instance: ReportedInstance) -> Iterator[monitor_pb2.InstanceUpdate]:
        """The instance's state as of this call, as the changes that lead to it, in pieces of bounded size."""
        held = [(tier, list(blocks)) for tier, blocks in instance.tiers]
        last = [instance.update(load=_with_requests(instance.load, instance.admitted))] if instance.load else []
        if instance.stale:
            last.append(instance.update(stale=True))
        yield instance.update(joined=instance.description)
        for tier, blocks in held:
            for start in range(0, len(blocks), PIECE_BLOCKS):
                piece = monitor_pb2.KvUpdate(stored=blocks[start : start + PIECE_BLOCKS], tier=tier)
                yield instance.update(kv=piece)
        yield from last


def _with_requests(load: worker_pb2.LoadReport, admitted: Mapping[str, bool]) -> worker_pb2.LoadReport:
    described = worker_pb2.LoadReport()
    described.CopyFrom(load)
    described.ClearField("admitted_request_ids")
    described.admitted_request_ids.extend(admitted)
    described.ClearField("ended_request_ids")
    described.ended_request_ids.extend(each for each, has_ended in admitted.items() if has_ended)
    return described
