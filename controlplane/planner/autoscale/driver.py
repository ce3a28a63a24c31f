"""Has the `AutoscaleManager` decide for the mesh: feeds it what is observed, and writes the scales it says.

What a replica sustains is worked out elsewhere (`CapacityMaker`), when the `ProfiledCapacityManager` says so."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from controlplane.deployment.deployment_status import DEPLOYMENTS_PREFIX, STARTING, DeploymentStatus
from controlplane.model.autoscale_record import POLICIES_PREFIX, SCALES_PREFIX, AutoscalePolicy, ScaleRecord
from controlplane.planner.autoscale.capacity_process import CapacityMaker
from controlplane.planner.autoscale.demand import Demand, DemandReader
from controlplane.planner.metrics import PlannerMetrics
from controlplane.planning.autoscale.events import (
    Adopted,
    AutoscaleEvent,
    Keep,
    Leave,
    Led,
    Observed,
    PolicySet,
    Publish,
    Recalled,
    Refused,
    Scale,
    Seen,
    Tick,
)
from controlplane.planning.autoscale.history import (
    HISTORIES_PREFIX,
    AutoscaleHistory,
    decode_history,
    encode_history,
)
from controlplane.planning.autoscale.manager import AutoscaleManager
from controlplane.planning.autoscale.profiled_capacity import (
    CapacityCase,
    Looked,
    Made,
    MakeCapacity,
    ProfiledCapacityManager,
    Removed,
)
from controlplane.planning.autoscale.status import AutoscaleStatus
from controlplane.planning.instance_profile import PROFILES_PREFIX, InstanceProfile
from mesh.errors import ConfigurationError, PenstockError, StoreError
from mesh.leadership_state import Lead
from mesh.membership import Directory
from mesh.runtime import Runtime
from mesh.store.interface import KeyValue, StateStore
from mesh.store.stored_folder import StoredFolder
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Between two looks at frontends and monitors; a request at the door of a model without replicas waits so long."""
NOBODY: Final = "nothing that starts instances follows this mesh: `penstock up` does so, and `penstock serve operator`"


class AutoscaleDriver:
    """Observes in every planner, so that whoever leads next knows the load too; writes only where it leads."""

    def __init__(
        self,
        store: StateStore,
        directory: Directory,
        member_id: str,
        lead: Lead,
        metrics: PlannerMetrics,
        runtime: Runtime,
        capacity_maker: CapacityMaker,
    ) -> None:
        self.manager = AutoscaleManager()
        self.capacities = ProfiledCapacityManager()
        self._capacity_maker = capacity_maker
        self._working_out = TaskSet("capacities")
        self._store = store
        self._member_id = member_id
        self._lead = lead
        self._metrics = metrics
        self._clock = runtime.clock
        self._reader = DemandReader(directory, runtime.transport)
        self._recalled: set[str] = set()
        """Models whose history was looked for in the state store since their policy was set."""
        self._policies = StoredFolder(store, POLICIES_PREFIX, AutoscalePolicy, AutoscalePolicy.checked, self._on_policy)
        self._scales = StoredFolder(store, SCALES_PREFIX, ScaleRecord, ScaleRecord.checked, self._on_scale)
        self._deployments = StoredFolder(store, DEPLOYMENTS_PREFIX, DeploymentStatus, lambda _: None)
        self._profiles = StoredFolder(store, PROFILES_PREFIX, InstanceProfile, lambda _: None)

    def start(self, tasks: TaskSet, on_error: Callable[[BaseException], None]) -> None:
        """Follow the store, look and decide, for ever."""
        for folder in (self._policies, self._scales, self._deployments, self._profiles):
            tasks.spawn(folder.follow(), name="autoscale records", on_error=on_error)
        tasks.spawn(self._run(), name="autoscale", on_error=on_error)

    @property
    def is_heard(self) -> bool:
        """Whether the state store has told all that decisions rest on."""
        return self._policies.is_heard and self._scales.is_heard and self._profiles.is_heard

    @property
    def policies(self) -> dict[str, AutoscalePolicy]:
        """In force, by model."""
        return dict(self._policies.records)

    def status(self, model: str) -> AutoscaleStatus | None:
        """As last decided here; None before."""
        return self.manager.status(model)

    async def set_policy(self, policy: AutoscalePolicy) -> int:
        """For the whole mesh; returns the revision. Raises `ConfigurationError` and `StoreError`."""
        return await self._store.put(policy.checked().key, msgspec.json.encode(policy))

    async def remove_policy(self, model: str) -> bool:
        """False if there was none. Its replicas stay as they are. Raises `StoreError`."""
        removed = await self._store.delete(POLICIES_PREFIX + model)
        await self._store.delete(SCALES_PREFIX + model)
        await self._store.delete(HISTORIES_PREFIX + model)
        return removed

    async def leave(self) -> None:
        """Keep what is remembered, before another planner leads. What cannot be written is logged."""
        try:
            await self._tell(Leave())
        except StoreError as error:
            log.warning("the history of scaled models is not kept", extra={"error": str(error)})

    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept contradicts itself."""
        self.manager.validate()
        self.capacities.validate()

    async def stop(self) -> None:
        """Work out no more capacities."""
        self._capacity_maker.stop()
        await self._working_out.cancel()

    # -- inside

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not (self.is_heard and self._policies.records):
                continue
            try:
                await self.look()
            except StoreError as error:
                log.warning("a scale cannot be written now; trying again", extra={"error": str(error)})

    async def look(self) -> None:
        """Observe, decide and write, once. Raises `StoreError`; nothing is decided before the history could be read."""
        for model in [name for name in self._policies.records if name not in self._recalled]:
            await self._recall(model)
        demand = await self._reader.look(self._policies.records)
        await self._tell(Led(self._lead.is_leading))
        for model, policy in self._policies.records.items():
            await self._look_at_profile(model, policy, demand)
            await self._tell(Refused(model, self._refusal(model)))
            if demand.is_heard:
                await self._tell(Seen(model, demand.running.get(model, {})))
                arrivals, ended, kept = (int(each[model]) for each in (demand.arrivals, demand.ended, demand.kept))
                await self._tell(Observed(model, arrivals, ended, kept, demand.waiting[model]))
        await self._tell(Tick())

    async def _tell(self, event: AutoscaleEvent) -> None:
        for instruction in self.manager.handle(event, self._clock.now_s()):
            match instruction:
                case Scale():
                    await self._write(instruction)
                case Publish(status):
                    self._metrics.show_scale(status)
                case Keep(history):
                    await self._keep(history)

    async def _look_at_profile(self, model: str, policy: AutoscalePolicy, demand: Demand) -> None:
        """Where all instances are of one kind; others sustain different rates, and are not scaled."""
        names = demand.profile_names.get(model, set())
        profile = self._profiles.records.get(next(iter(names))) if len(names) == 1 else None
        await self._tell_capacities(Looked(policy, profile, demand.lengths.get(model, ())))

    async def _tell_capacities(self, event: Looked | Made | Removed) -> None:
        for instruction in self.capacities.handle(event, self._clock.now_s()):
            match instruction:
                case MakeCapacity(case):
                    self._working_out.spawn(self._work_out(case), name=f"capacity of {case.model}")
                case known:
                    await self._tell(known)

    async def _work_out(self, case: CapacityCase) -> None:
        try:
            made = Made(case, await self._capacity_maker.curve(case))
            found = made.curve.capacity_per_s(case.policy.share) if made.curve is not None else 0.0
            log.info(
                "what a replica sustains is worked out",
                extra={"model": case.model, "profile": case.profile.name, "capacity_per_s": round(found, 4)},
            )
        except PenstockError as error:
            made = Made(case, None, str(error))
            log.warning(
                "what a replica sustains cannot be worked out from its profile: it counts as seen",
                extra={"model": case.model, "profile": case.profile.name, "reason": str(error)},
            )
        await self._tell_capacities(made)

    async def _recall(self, model: str) -> None:
        history = self._readable(model, await self._store.get(HISTORIES_PREFIX + model))
        self._recalled.add(model)
        if history is not None:
            age_s = max(0.0, self._clock.unix_s() - history.written_unix_s)
            await self._tell(Recalled(history, age_s))
            log.info("the history of a scaled model is read", extra={"model": model, "age_s": round(age_s, 3)})

    async def _keep(self, history: AutoscaleHistory) -> None:
        """As the leader, and never over what a later one has written. A failure is counted, and holds up no scale."""
        key = HISTORIES_PREFIX + history.model
        written = msgspec.structs.replace(history, written_unix_s=self._clock.unix_s(), epoch=self._lead.epoch)
        try:
            entry = await self._store.get(key)
            standing = self._readable(history.model, entry)
            if self._lead.is_leading and (standing is None or standing.epoch <= written.epoch):
                revision = entry.mod_revision if entry is not None else 0
                await self._store.compare_and_swap(key, revision, encode_history(written))
        except StoreError as error:
            self._metrics.histories_lost.labels(history.model, "not_written").inc()
            log.warning(
                "the history of a scaled model is not kept", extra={"model": history.model, "error": str(error)}
            )

    def _readable(self, model: str, entry: KeyValue | None) -> AutoscaleHistory | None:
        """None for what is not there, or cannot be used: it is written over."""
        if entry is None:
            return None
        try:
            return decode_history(entry.value)
        except ConfigurationError as error:
            self._metrics.histories_lost.labels(model, "not_read").inc()
            log.error("the history of a scaled model cannot be used", extra={"model": model, "error": str(error)})
            return None

    async def _write(self, scale: Scale) -> None:
        """As the leader, and never over what a later one has written. Where it is not written, what stands counts."""
        record = ScaleRecord(
            scale.model, scale.replicas, scale.leave_first, scale.why, self._lead.epoch, self._member_id, scale.kinds
        )
        written = False
        try:
            entry = await self._store.get(record.key)
            standing = None if entry is None else _decoded(entry.value)
            is_stale = standing is not None and standing.epoch > record.epoch
            if self._lead.is_leading and not is_stale:
                revision = entry.mod_revision if entry is not None else 0
                swapped = await self._store.compare_and_swap(record.key, revision, msgspec.json.encode(record))
                written = swapped is not None
        finally:
            if not written:
                former = self._scales.records.get(scale.model)
                if former is not None:
                    self.manager.handle(Adopted(scale.model, former.replicas, former.kinds), self._clock.now_s())
                else:
                    self.manager.handle(Adopted(scale.model, None), self._clock.now_s())
        if written:
            log.warning(
                "a model is scaled", extra={"model": scale.model, "replicas": scale.replicas, "reason": scale.why}
            )
        else:
            log.warning("a scale is dropped: another planner decides", extra={"model": scale.model})

    def _refusal(self, model: str) -> str:
        """Why what is wanted does not come; empty: it does, or it is under way."""
        if not self._deployments.records:
            return NOBODY if model in self._scales.records else ""
        kinds = self._scales.records[model].kinds if model in self._scales.records else ()
        here = {"", *(record.gpu_kind for record in self._deployments.records.values())}
        for each in kinds:
            if each.gpu not in here:
                return f"nothing follows this mesh that has {each.gpu}: say so by `penstock up --gpu-kind {each.gpu}`"
        missing = [
            each.why
            for record in self._deployments.records.values()
            for each in record.missing
            if each.model == model and each.why != STARTING
        ]
        return missing[0] if missing else ""

    def _on_policy(self, model: str, policy: AutoscalePolicy | None) -> None:
        self.manager.handle(PolicySet(model, policy), self._clock.now_s())
        standing = self._scales.records.get(model)
        if policy is None:
            self._recalled.discard(model)
            self.capacities.handle(Removed(model), self._clock.now_s())
            self._metrics.hide_scale(model)
        elif standing is not None:
            self._on_scale(model, standing)

    def _on_scale(self, model: str, scale: ScaleRecord | None) -> None:
        if scale is not None:
            self.manager.handle(Adopted(model, scale.replicas, scale.kinds), self._clock.now_s())


def _decoded(value: bytes) -> ScaleRecord | None:
    """None for what cannot be read, which is written over."""
    try:
        return msgspec.json.decode(value, type=ScaleRecord)
    except msgspec.MsgspecError:
        log.exception("a scale cannot be read")
        return None
