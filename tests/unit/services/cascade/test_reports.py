"""Cascade routers tell the planner what they see, in one process."""

import asyncio
from typing import Any

import msgspec
import pytest

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planner.role import PlannerRole
from controlplane.planner.settings import PlannerSettings
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import cascade_pb2, cascade_pb2_grpc, planner_pb2, planner_pb2_grpc
from services.cascade.role import CascadeRole
from services.cascade.settings import CascadeSettings
from tests.unit.controlplane.local_mesh import local_mesh

pytestmark = pytest.mark.live

RECORD = CascadeRecord("both", ("small", "large"), (50.0,), judges=("exact",))
GOAL = CascadeGoal("both", 2, ("a@H100", "b@H100"), quality=80.0)
TIME_LIMIT_S = 20.0


@pytest.mark.slow
async def test_two_routers_report_their_windows_and_the_planner_adds_them_up() -> None:
    async with local_mesh() as mesh:
        await mesh.store.put(RECORD.key, msgspec.json.encode(RECORD))
        planner = await mesh.start(PlannerRole(PlannerSettings()), "planner-0")
        await mesh.store.put(GOAL.key, msgspec.json.encode(GOAL))
        # No frontend runs, so that the tiers give no answer: every sample is left out, and the rate is known.
        routers = [
            await mesh.start(CascadeRole(CascadeSettings(sample_window_s=0.2)), f"cascade-{number}")
            for number in range(2)
        ]

        async def verdict() -> str:
            async with open_channel(GrpcTransport(), planner.address) as channel:
                stub: Any = planner_pb2_grpc.PlannerStub(channel)
                plans = (await stub.ListPlans(planner_pb2.ListPlansRequest())).plans
                return str(plans[0].verdict)

        async with asyncio.timeout(TIME_LIMIT_S):
            while "no requests came" not in await verdict():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            request = cascade_pb2.JudgeRequest(cascade="both", tier="small", sample_only=True, first_answer=True)
            while "too few requests to plan for (0 of 20; " not in await verdict():
                for router in routers:
                    async with open_channel(GrpcTransport(), router.address) as channel:
                        stub: Any = cascade_pb2_grpc.CascadeStub(channel)
                        await stub.Judge(request)
        labels = {"cascade": "both"}
        told = [router.metric("penstock_cascade_workloads_total", **labels, outcome="reported") for router in routers]
        assert all(told)
        heard = planner.metric("penstock_planner_workloads_total", **labels)
        assert heard is not None
        assert heard >= sum(count or 0 for count in told), "those under way may be more"
