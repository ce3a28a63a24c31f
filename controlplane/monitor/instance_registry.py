"""What the monitor knows of the instances: reports in, changes out. No I/O, no clock.

Messages of the contract serve as values here: the monitor passes them on unread wherever it can.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from mesh.invariants import invariants
from penstock.v1 import monitor_pb2, worker_pb2

MAX_ADMITTED = 1024
"""Of one instance: more than it can admit while a watcher changes its monitor."""
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
        self.admitted: dict[str, None] = {}
        """Requests that it reported as admitted of late, oldest first: who begins to watch counts those that it knows
        as placed no longer as on their way."""
        self.blocks: set[int] = set()
        self.superseded = False
        """A newer stream speaks for the instance now; this one has no say any more."""

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

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._instances: dict[str, ReportedInstance] = {}

    def instances(self) -> list[ReportedInstance]:
        """In the order of joining."""
        return list(self._instances.values())

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
        instance.admitted.update(dict.fromkeys(load.admitted_request_ids))
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
        """The instance's prefix cache has changed."""
        if change.cleared:
            instance.blocks.clear()
        instance.blocks.difference_update(change.removed)
        instance.blocks.update(change.stored)
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
        blocks = list(instance.blocks)
        last = [instance.update(load=_with_admitted(instance.load, instance.admitted))] if instance.load else []
        if instance.stale:
            last.append(instance.update(stale=True))
        yield instance.update(joined=instance.description)
        for start in range(0, len(blocks), PIECE_BLOCKS):
            yield instance.update(kv=monitor_pb2.KvUpdate(stored=blocks[start : start + PIECE_BLOCKS]))
        yield from last


def _with_admitted(load: worker_pb2.LoadReport, admitted: Iterable[str]) -> worker_pb2.LoadReport:
    described = worker_pb2.LoadReport()
    described.CopyFrom(load)
    described.ClearField("admitted_request_ids")
    described.admitted_request_ids.extend(admitted)
    return described
