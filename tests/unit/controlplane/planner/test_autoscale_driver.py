"""Planners one after the other over one state store: what the last has seen of a model, the next one knows."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.deployment.deployment_status import DEPLOYMENTS_PREFIX, DeploymentStatus
from controlplane.model.autoscale_record import SCALES_PREFIX, AutoscalePolicy, ScaleRecord
from controlplane.model.replica_kind import KindReplicas, ReplicaKind
from controlplane.planner.autoscale import driver as driver_module
from controlplane.planner.autoscale.demand import Demand
from controlplane.planner.autoscale.driver import AutoscaleDriver
from controlplane.planner.metrics import PlannerMetrics
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.history import HISTORIES_PREFIX, decode_history, encode_history
from controlplane.planning.autoscale.manager import KEEP_S
from controlplane.planning.autoscale.profiled_capacity import ENOUGH, CapacityCase, RequestLength
from mesh.errors import PenstockError, PlanInfeasible
from mesh.membership import Directory
from mesh.runtime import SystemClock, SystemEntropy, system_runtime
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from mesh.tasks import TaskSet
from tests.still_clock import StillClock
from tests.unit.controlplane.local_mesh import until
from tests.unit.mesh.leading import Leading
from tests.unit.simulator.cascade.instance_profiles import profile_of

pytestmark = pytest.mark.live

POLICY = AutoscalePolicy("m", ttft_ms=1000, maximum=10, cold_start_s=60, capacity_per_s=2.0, interval_s=10)
KEY = HISTORIES_PREFIX + "m"
CURVE = CapacityCurve((1.0, 4.0, 5.0), (1.0, 1.0, 0.5))


class Maker:
    """Says a curve that was given, or raises what was given."""

    def __init__(self) -> None:
        self.answer: CapacityCurve | PenstockError = CURVE
        self.cases: list[CapacityCase] = []

    async def curve(self, case: CapacityCase) -> CapacityCurve:
        self.cases.append(case)
        if isinstance(self.answer, PenstockError):
            raise self.answer
        return self.answer

    def stop(self) -> None:
        pass


class Mesh:
    """A state store that outlives planners, and a load of so many requests an interval."""

    def __init__(self, host: StoreHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = EmbeddedStore(host)
        self.clock = StillClock(5000.0)
        self.arrivals = 100
        self.lengths: list[RequestLength] = []
        self.profile_names: set[str] = set()
        self.maker = Maker()
        self.tasks = TaskSet("test")
        mesh = self

        class Reader:
            def __init__(self, *_: object) -> None:
                pass

            async def look(self, _: object) -> Demand:
                demand = Demand(is_heard=True, running={"m": {f"m-{number}": 1 for number in range(7)}})
                for counter in (demand.arrivals, demand.ended, demand.kept):
                    counter["m"] = mesh.arrivals
                demand.lengths["m"] = mesh.lengths
                demand.profile_names["m"] = mesh.profile_names
                return demand

        monkeypatch.setattr(driver_module, "DemandReader", Reader)
        monkeypatch.setattr(driver_module, "LOOK_S", 3600.0)

    async def planner(self, member_id: str, leading: Leading) -> tuple[AutoscaleDriver, CollectorRegistry]:
        registry = CollectorRegistry()
        runtime = replace(system_runtime(), clock=self.clock)
        directory = Directory(self.store)
        driver = AutoscaleDriver(
            self.store, directory, member_id, leading, PlannerMetrics(registry), runtime, self.maker
        )

        def fail(error: BaseException) -> None:
            raise error

        driver.start(self.tasks, fail)

        async def policies() -> dict[str, AutoscalePolicy]:
            await asyncio.sleep(0)
            return driver.policies

        async def profiles() -> bool:
            await asyncio.sleep(0)
            return driver.is_heard

        await until(policies, lambda found: "m" in found)
        await until(profiles, lambda is_heard: is_heard)
        return driver, registry

    async def intervals(self, driver: AutoscaleDriver, count: int) -> None:
        for _ in range(count):
            self.clock.at_s += POLICY.interval_s
            await driver.look()
            await asyncio.sleep(0)  # a capacity is worked out meanwhile
            driver.validate()

    async def replicas(self) -> int:
        entry = await self.store.get(SCALES_PREFIX + "m")
        assert entry is not None
        return msgspec.json.decode(entry.value, type=ScaleRecord).replicas


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    host = StoreHost(SystemClock(), SystemEntropy())
    here = Mesh(host, monkeypatch)
    await here.store.put(POLICY.key, msgspec.json.encode(POLICY))
    yield here
    await here.tasks.cancel()
    await here.store.close()
    host.close()


async def test_a_restarted_planner_goes_on_from_what_the_last_one_kept(mesh: Mesh) -> None:
    first, _ = await mesh.planner("planner-0", Leading())
    await mesh.intervals(first, 80)
    before, status = await mesh.replicas(), first.status("m")
    assert status is not None
    assert before == 5, "errors are known by now: nothing is added to 10 requests/s"
    await first.leave()
    mesh.clock.at_s = 70.0  # another machine's monotonic clock
    mesh.clock.unix_at_s = 5000.0 + 81 * POLICY.interval_s
    second, registry = await mesh.planner("planner-1", Leading(epoch=2))
    await mesh.intervals(second, 1)
    assert await mesh.replicas() == before
    told = second.status("m")
    assert told is not None
    assert told.history_s == status.history_s + 2 * POLICY.interval_s, "with the interval that nobody observed"
    assert registry.get_sample_value("penstock_planner_autoscale_history_seconds", {"model": "m"}) == told.history_s


async def test_history_is_kept_every_so_often_and_only_by_who_leads(mesh: Mesh) -> None:
    follower, _ = await mesh.planner("planner-1", Leading(is_leading=False))
    await mesh.intervals(follower, 40)
    await follower.leave()
    assert await mesh.store.get(KEY) is None
    leader, _ = await mesh.planner("planner-0", Leading(epoch=7))
    revisions = set()
    for _ in range(2 * round(KEEP_S / POLICY.interval_s)):
        await mesh.intervals(leader, 1)
        entry = await mesh.store.get(KEY)
        revisions.add(entry.mod_revision if entry is not None else 0)
    assert len(revisions) == 3, "none, then one each five minutes"
    late, _ = await mesh.planner("planner-2", Leading(epoch=3))
    await mesh.intervals(late, 1)
    await late.leave()
    standing = await mesh.store.get(KEY)
    assert standing is not None
    assert decode_history(standing.value).epoch == 7, "a later leader's is not written over"


async def test_a_damaged_history_is_told_of_and_made_anew(mesh: Mesh) -> None:
    await mesh.store.put(KEY, b"penstock autoscale history 1 00000000\nx")
    driver, registry = await mesh.planner("planner-0", Leading())
    await mesh.intervals(driver, 2)
    labels = {"model": "m", "reason": "not_read"}
    assert registry.get_sample_value("penstock_planner_autoscale_histories_lost_total", labels) == 1
    assert await mesh.replicas() == 7, "30 % above 10 requests/s, as nothing is known of errors"
    await driver.leave()
    written = await mesh.store.get(KEY)
    assert written is not None
    assert decode_history(written.value).model == "m"


async def test_what_is_scaled_no_more_leaves_no_history(mesh: Mesh) -> None:
    driver, _ = await mesh.planner("planner-0", Leading())
    await mesh.intervals(driver, 3)
    await driver.leave()
    kept = await mesh.store.get(KEY)
    assert kept is not None
    assert encode_history(decode_history(kept.value)) == kept.value
    await driver.remove_policy("m")
    assert await mesh.store.get(KEY) is None


async def test_what_a_replica_sustains_comes_from_the_profile_of_its_kind(mesh: Mesh) -> None:
    await mesh.store.put(POLICY.key, msgspec.json.encode(msgspec.structs.replace(POLICY, capacity_per_s=None)))
    profile = profile_of("m", 2.0)
    await mesh.store.put(profile.key, msgspec.json.encode(profile))
    mesh.profile_names, mesh.lengths = {profile.name}, [RequestLength(100, 50)] * (ENOUGH // 2)
    driver, registry = await mesh.planner("planner-0", Leading())
    await mesh.intervals(driver, 1)
    assert not mesh.maker.cases, "too few requests have ended"
    await mesh.intervals(driver, 4)
    (case,) = mesh.maker.cases
    assert (case.profile, len(case.lengths)) == (profile, ENOUGH)
    status = driver.status("m")
    assert status is not None
    assert status.capacity_per_s == CURVE.capacity_per_s(POLICY.share)
    assert "a replica sustains 4.02, by the profile vllm/m/H100" in status.why
    assert registry.get_sample_value("penstock_planner_autoscale_capacity", {"model": "m"}) == status.capacity_per_s
    assert await mesh.replicas() == 7, "what was wanted before settles first"
    mesh.profile_names = {profile.name, "vllm/m/A100"}
    await mesh.intervals(driver, 100)
    assert len(mesh.maker.cases) == 1, "instances of two kinds have no profile, and nothing has changed"
    assert await mesh.replicas() == 2, "nobody was late, so the margin has fallen"


async def test_where_no_capacity_can_be_worked_out_it_is_as_seen_and_that_is_said(mesh: Mesh) -> None:
    await mesh.store.put(POLICY.key, msgspec.json.encode(msgspec.structs.replace(POLICY, capacity_per_s=None)))
    profile = profile_of("m", 2.0)
    await mesh.store.put(profile.key, msgspec.json.encode(profile))
    mesh.profile_names, mesh.lengths = {profile.name}, [RequestLength(100_000, 50)] * ENOUGH
    mesh.maker.answer = PlanInfeasible("no such requests")
    driver, _ = await mesh.planner("planner-0", Leading())
    await mesh.intervals(driver, 5)
    status = driver.status("m")
    assert status is not None
    assert f"as seen ({profile.name}: no such requests)" in status.why
    assert status.capacity_per_s == pytest.approx(1.5 * 10 / 7), "of seven that were seen to sustain ten a second"


async def test_kinds_are_written_with_the_scale_and_one_that_no_machine_has_is_told_of(mesh: Mesh) -> None:
    kinds = (ReplicaKind(0.6, 5.0, "A10"), ReplicaKind(1.0, 9.0, "H100"))
    mixed = msgspec.structs.replace(POLICY, kinds=kinds, capacity_per_s=None)
    await mesh.store.put(POLICY.key, msgspec.json.encode(mixed))
    driver, _ = await mesh.planner("planner-0", Leading())
    await mesh.store.put(DEPLOYMENTS_PREFIX + "a", msgspec.json.encode(DeploymentStatus("a", {}, gpu_kind="A10")))
    await mesh.intervals(driver, 3)
    entry = await mesh.store.get(SCALES_PREFIX + "m")
    assert entry is not None
    written = msgspec.json.decode(entry.value, type=ScaleRecord).checked()
    assert written.kinds == (KindReplicas(1, "A10"), KindReplicas(1, "H100")), "the least for 13 requests/s"
    status = driver.status("m")
    assert status is not None
    assert "penstock up --gpu-kind H100" in status.refused
    await mesh.store.put(DEPLOYMENTS_PREFIX + "h", msgspec.json.encode(DeploymentStatus("h", {}, gpu_kind="H100")))
    for _ in range(20):
        await mesh.intervals(driver, 1)
    status = driver.status("m")
    assert status is not None
    assert not status.refused
