"""When stages are planned, and how their boundaries have moved."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from controlplane.planner.metrics import PlannerMetrics, PlanOutcome
from controlplane.planner.stages.collecting import collect
from controlplane.planner.stages.making import LengthStatistics, make_record, quality_for
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import PROFILES_PREFIX, InstanceProfile
from controlplane.policies.stages.record import (
    BOUNDARY_PREFIX,
    LAYOUT_PREFIX,
    STAGES_KEY,
    BoundaryRecord,
    StageRecord,
    StagesSetting,
    layout_key,
)
from controlplane.protocols.bid_ask.limits import BidAskLimits
from mesh.errors import ConfigurationError, PenstockError
from mesh.leadership_state import Lead
from mesh.membership import Directory, Member
from mesh.runtime import Runtime
from mesh.store.followed_prefix import FollowedPrefix
from mesh.store.interface import StateStore
from mesh.store.stored_setting import StoredSetting
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

CHECK_S = 0.5
SETTLE_S = 5.0
"""Instances that came or went are planned for once the others have stayed the same for so long."""
RETRY_S = 5.0
"""After a plan that could not be made."""
REMEMBERED_MOVES = 256
UNSTAGED_PHASE = "prefill"
"""Instances that never decode take no part."""


class StagePlanManager:
    """Makes the plans of every model while stages are switched on; takes them away when they are switched off."""

    def __init__(
        self,
        store: StateStore,
        directory: Directory,
        member_id: str,
        lead: Lead,
        metrics: PlannerMetrics,
        runtime: Runtime,
    ) -> None:
        self.setting = StagesSetting()
        self.moves: deque[BoundaryRecord] = deque(maxlen=REMEMBERED_MOVES)
        """Of boundaries, oldest first."""
        self.obstacles: dict[str, str] = {}
        """By model: why there is no plan, or no new one."""
        self._store = store
        self._directory = directory
        self._member_id = member_id
        self._lead = lead
        self._metrics = metrics
        self._clock = runtime.clock
        self._threads = runtime.threads
        self._transport = runtime.transport
        self._plans = FollowedPrefix(store, LAYOUT_PREFIX, StageRecord, lambda key, record: None)
        self._boundaries = FollowedPrefix(store, BOUNDARY_PREFIX, BoundaryRecord, self._moved)
        self._stored_setting = StoredSetting(store, STAGES_KEY, StagesSetting, StagesSetting(), self._apply)
        self._seen: dict[str, tuple[tuple[str, ...], float]] = {}
        """By model: the instances, and since when they are these."""
        self._tried_s: dict[str, float] = {}
        self._is_told = False
        """The store has said whether stages are on. Before that nothing is planned, and no plan taken away."""
        self._read_revision = 0
        """Of the key of the plan that is about to be replaced."""
        self._planning = asyncio.Lock()
        """Plans on demand and those that are due follow each other."""

    def start(self, tasks: TaskSet, on_error: Callable[[BaseException], None]) -> None:
        """Follow the store and plan, for ever."""
        tasks.spawn(self._plans.follow(), name="stage plans", on_error=on_error)
        tasks.spawn(self._boundaries.follow(), name="stage boundaries", on_error=on_error)
        tasks.spawn(self._stored_setting.follow(), name="stages setting", on_error=on_error)
        tasks.spawn(self._run(), name="stages", on_error=on_error)

    def record(self, model: str) -> StageRecord | None:
        """The model's plan in force, as last heard from the store; None if there is none."""
        return self._plans.records.get(layout_key(model))

    def boundaries(self, record: StageRecord) -> dict[str, float]:
        """Where the ranges of this plan's instances end by now."""
        revision, members = record.layout.revision, set(record.layout.instance_ids)
        return {
            found.instance_id: found.boundary_tokens
            for found in self._boundaries.records.values()
            if found.revision == revision and found.instance_id in members and found.boundary_tokens
        }

    def workers(self) -> dict[str, tuple[Member, ...]]:
        """Those that take part, by model; near ones next to each other."""
        found: dict[str, list[Member]] = {}
        for member in self._directory.members("worker"):
            if member.attributes.get("phase", "any") != UNSTAGED_PHASE:
                found.setdefault(member.attributes.get("model", ""), []).append(member)
        return {
            model: tuple(sorted(members, key=lambda m: (m.address.rpartition(":")[0], m.member_id)))
            for model, members in sorted(found.items())
        }

    async def set(self, setting: StagesSetting) -> None:
        """For the whole mesh. Raises `StoreError` and `DeadlineExceeded`."""
        await self._stored_setting.put(setting)

    @property
    def is_leading(self) -> bool:
        """Whether this planner makes the plans."""
        return self._lead.is_leading

    async def plan_now(self) -> None:
        """All models, if stages are switched on; what stands in the way is kept in `obstacles`."""
        if self.setting.enabled:
            for model, members in self.workers().items():
                await self._plan(model, members)

    # -- inside

    def _apply(self, setting: StagesSetting, revision: int) -> None:
        self._is_told = True
        if setting != self.setting:
            log.warning(
                "stages set", extra={"enabled": setting.enabled, "method": setting.method, "revision": revision}
            )
            self.setting = setting
            self._tried_s.clear()

    def _moved(self, key: str, record: BoundaryRecord | None) -> None:
        if record is not None:
            self.moves.append(record)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if not (self._is_told and self._lead.is_leading):
                continue
            try:
                if self.setting.enabled:
                    for model, members in self.workers().items():
                        if self._is_due(model, members):
                            await self._plan(model, members)
                else:
                    await self._take_away()
            except PenstockError as error:
                log.warning("stages cannot be planned now; trying again", extra={"error": str(error)})

    def _is_due(self, model: str, members: Sequence[Member]) -> bool:
        now_s = self._clock.now_s()
        ids = tuple(sorted(member.member_id for member in members))
        seen, since_s = self._seen.get(model, ((), now_s))
        if seen != ids:
            self._seen[model] = (ids, now_s)
            since_s = now_s
        if now_s - self._tried_s.get(model, -RETRY_S) < RETRY_S:
            return False
        record = self.record(model)
        if record is None:
            return True
        if set(record.layout.instance_ids) != set(ids):
            return now_s - since_s >= SETTLE_S
        if record.method is not self.setting.method:
            return True
        # Either way: a plan from the future was made by a clock that has been set back since.
        is_old = abs(1000 * self._clock.unix_s() - record.planned_unix_ms) >= 1000 * self.setting.replan_s
        return is_old or record.parameters != self.setting.parameters

    async def _plan(self, model: str, members: Sequence[Member]) -> None:
        async with self._planning:
            await self._plan_alone(model, members)

    async def _plan_alone(self, model: str, members: Sequence[Member]) -> None:
        self._tried_s[model] = self._clock.now_s()
        statistics = await collect(self._transport, members)
        if len(statistics.lengths) < self.setting.fewest_lengths:
            self.obstacles[model] = (
                f"{len(statistics.lengths)} requests have ended so far, a plan needs {self.setting.fewest_lengths}"
            )
            return
        try:
            record = await self._made(model, members, statistics)
        except PenstockError as error:
            self.obstacles[model] = str(error)
            self._metrics.stage_plans.labels(model, PlanOutcome.FAILED).inc()
            log.error("a stage plan cannot be made", extra={"model": model, "error": str(error)})
            return
        revision = await self._written(model, record)
        if revision is None:
            return
        self._metrics.stage_plans.labels(model, PlanOutcome.APPLIED).inc()
        self.obstacles.pop(model, None)
        await self._forget_boundaries()
        log.warning(
            "stages planned",
            extra={
                "model": model,
                "stages": record.layout.stages,
                "boundaries": record.layout.boundaries_tokens,
                "lengths": record.lengths,
                "profile": record.profile,
            },
        )

    async def _made(self, model: str, members: Sequence[Member], statistics: LengthStatistics) -> StageRecord:
        engine = members[0].attributes.get("engine", "")
        degrees = (members[0].attributes.get(name, "1") for name in ("tensor_parallel", "pipeline_parallel"))
        shape = ReplicaShape(*map(int, degrees))
        mean_output = sum(outputs for _, outputs in statistics.lengths) / len(statistics.lengths)
        before = await self._stored(model)
        # 256 instances take a few hundred milliseconds: not on the event loop.
        return await self._threads.run(
            make_record,
            model,
            [member.member_id for member in members],
            statistics,
            quality_for(await self._profiles(), engine, model, mean_output, shape),
            self.setting,
            BidAskLimits().throughput_tokens_s,
            None if before is None else before.layout,
            int(1000 * self._clock.unix_s()),
        )

    async def _written(self, model: str, record: StageRecord) -> int | None:
        """Only as the leader, and only over the plan that was read when this one was made: a planner that was paused
        while another one took over overwrites nothing. None if it was not written."""
        if self._lead.is_leading:
            led = msgspec.structs.replace(record, epoch=self._lead.epoch, leader=self._member_id)
            content = msgspec.json.encode(led)
            revision = await self._store.compare_and_swap(layout_key(model), self._read_revision, content)
            if revision is not None:
                return revision
            self.obstacles[model] = "the plan was changed by another planner while one was being made"
        else:
            self.obstacles[model] = "this planner ceased to lead while a plan was being made"
        self._metrics.stage_plans.labels(model, PlanOutcome.OUTDATED).inc()
        log.warning("a stage plan is dropped", extra={"model": model, "reason": self.obstacles[model]})
        return None

    async def _stored(self, model: str) -> StageRecord | None:
        """The plan that stands in the store now, of which the followed one may know nothing yet: no two plans may
        have one revision. One that cannot be read is none."""
        entry = await self._store.get(layout_key(model))
        self._read_revision = 0 if entry is None else entry.mod_revision
        if entry is None:
            return None
        try:
            return msgspec.json.decode(entry.value, type=StageRecord)
        except (msgspec.MsgspecError, ConfigurationError) as error:
            log.error("a stage plan cannot be read", extra={"model": model, "error": str(error)})
            return None

    async def _profiles(self) -> list[InstanceProfile]:
        found = []
        for entry in (await self._store.range(PROFILES_PREFIX)).entries:
            try:
                found.append(msgspec.json.decode(entry.value, type=InstanceProfile))
            except msgspec.MsgspecError as error:
                log.error("a profile cannot be read", extra={"key": entry.key, "error": str(error)})
        return found

    async def _forget_boundaries(self) -> None:
        """Of instances that have gone."""
        alive = {member.member_id for member in self._directory.members("worker")}
        for key, found in list(self._boundaries.records.items()):
            if found.instance_id not in alive:
                await self._store.delete(key)

    async def _take_away(self) -> None:
        for key in list(self._plans.records):
            await self._store.delete(key)
            log.warning("stages taken away", extra={"key": key})
        self.obstacles.clear()
