"""How cascade routers reach the planner with what they have sampled."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.cascade_record import CascadeRecord
from controlplane.model.duties import CASCADES
from mesh.leadership import LEADERS_PREFIX
from mesh.leadership_state import LeaderRecord
from mesh.membership import Member
from mesh.runtime import GrpcTransport, system_runtime
from mesh.store import open_store
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.planner_link import PlannerLink
from services.cascade.sampling.sampler import SampledWorkload

RECORD = CascadeRecord("both", ("small", "medium", "large"), (50.0, 50.0), judges=("first", "second"))


class FakeDirectory:
    """Of a mesh in which nothing runs."""

    def members(self, role: str) -> list[Any]:
        return []


@pytest.mark.parametrize(("leader", "told"), [("", "host-0:1"), ("planner-1", "host-1:1"), ("gone", "host-0:1")])
async def test_all_routers_tell_the_planner_that_leads(leader: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refused(_transport: object, address: str, _role: str) -> Any:
        asked.append(address)
        raise ConnectionError("enough seen")

    monkeypatch.setattr("services.cascade.sampling.planner_link.open_channel", refused)
    planners = [Member("planner", f"planner-{n}", "", f"host-{n}:1", "") for n in (0, 1)]
    workload = SampledWorkload(RECORD, 10, 10.0, (), "first")
    store = open_store("embedded:", system_runtime())
    if leader:
        record = LeaderRecord(CASCADES, leader, "1", epoch=7)
        await store.put(LEADERS_PREFIX + CASCADES, msgspec.json.encode(record))
    for order in (planners, planners[::-1]):
        directory: Any = SimpleNamespace(members=lambda _, order=order: order)
        link = PlannerLink(directory, store, "cascade-0", GrpcTransport(), CascadeMetrics(CollectorRegistry()))
        with pytest.raises(ConnectionError):
            await link.report(workload)
    await store.close()
    assert asked == [told, told]


async def test_a_workload_that_no_planner_takes_is_counted_as_lost() -> None:
    registry = CollectorRegistry()
    directory: Any = FakeDirectory()
    workload = SampledWorkload(RECORD, 10, 10.0, (), "first")
    store = open_store("embedded:", system_runtime())
    await PlannerLink(directory, store, "cascade-0", GrpcTransport(), CascadeMetrics(registry)).report(workload)
    await store.close()
    labels = {"cascade": "both", "outcome": "lost"}
    assert registry.get_sample_value("penstock_cascade_workloads_total", labels) == 1
