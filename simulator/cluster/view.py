"""The simulation as controllers see it."""

from collections.abc import Callable

from controlplane.model.instance import InstanceDescription, LoadReport
from controlplane.model.migration_order import MigrationOrder
from controlplane.model.running_request import RunningRequest
from controlplane.model.snapshot import Snapshot
from simulator.cluster.config import ClusterConfig, InstanceSpec
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.fleet import SimulatedFleet
from simulator.cluster.ledger import Ledger
from simulator.cluster.migration.migrations import Migrations
from simulator.cluster.worker import Worker


class ClusterView:
    """A `Cluster` over a simulation under way."""

    def __init__(
        self,
        config: ClusterConfig,
        events: EventQueue,
        fleet: SimulatedFleet,
        ledger: Ledger,
        migrations: Migrations,
    ) -> None:
        self._config = config
        self._events = events
        self._fleet = fleet
        self._ledger = ledger
        self._migrations = migrations

    @property
    def model(self) -> str:
        return self._config.model

    @property
    def now_ms(self) -> float:
        return self._events.now_ms

    @property
    def message_delay_ms(self) -> float:
        return self._config.migration.message_delay_ms

    def instance_ids(self) -> tuple[str, ...]:
        return tuple(self._fleet.workers)

    def description(self, instance_id: str) -> InstanceDescription:
        return self._fleet.workers[instance_id].description

    def spec(self, instance_id: str) -> InstanceSpec:
        return self._fleet.spec(instance_id)

    def snapshot(self) -> Snapshot | None:
        self._fleet.see(self.now_ms)
        return self._fleet.table.snapshot(self.model)

    def load(self, instance_id: str) -> LoadReport:
        return self._looked_at(instance_id).instance.load()

    def cached_blocks(self) -> dict[str, int]:
        snapshot = self.snapshot()
        if snapshot is None:
            return {}
        slots = zip(snapshot.instances, snapshot.slots.tolist(), strict=True)
        return {instance.instance_id: self._fleet.table.index.held_blocks(slot) for instance, slot in slots}

    def running(self, instance_id: str) -> list[RunningRequest]:
        return self._looked_at(instance_id).instance.decoding_requests()

    def prompt_tokens(self, request_id: str) -> int:
        return self._ledger.open[request_id].request.prompt_tokens

    def moves(self, request_id: str) -> bool:
        return self._migrations.moves(request_id)

    def oracle_remaining_tokens(self, request_id: str) -> int:
        entry = self._ledger.open[request_id]
        generated_tokens = entry.request.emitted_tokens
        if entry.owner is not None and request_id in self._fleet.workers[entry.owner.instance_id].instance.request_ids:
            generated_tokens = self._looked_at(entry.owner.instance_id).instance.generated_tokens(request_id)
        return entry.request.output_tokens - generated_tokens

    def order(self, order: MigrationOrder) -> None:
        self._migrations.order(order)

    def after(self, delay_ms: float, act: Callable[[float], None]) -> None:
        self._fleet.will_look(self.now_ms + delay_ms)
        self._events.at(self.now_ms + delay_ms, Rank.MESSAGE, act, background=True)

    def _looked_at(self, instance_id: str) -> Worker:
        worker = self._fleet.workers[instance_id]
        worker.look(self.now_ms)
        return worker
