"""The planner shows the plan that stands in the state store."""

from controlplane.planner.role import PlannerRole
from controlplane.planner.service import PLAN_KEY
from controlplane.planner.settings import PlannerSettings
from mesh.rpc.client import open_channel
from penstock.v1 import planner_pb2, planner_pb2_grpc
from tests.unit.controlplane.local_mesh import local_mesh


async def test_the_plan_is_empty_until_one_is_stored() -> None:
    async with local_mesh() as mesh:
        planner = await mesh.start(PlannerRole(PlannerSettings()), "planner-0")
        async with open_channel(planner.address) as channel:
            stub = planner_pb2_grpc.PlannerStub(channel)
            answer = await stub.GetPlan(planner_pb2.GetPlanRequest())
            assert (answer.revision, answer.plan_json) == (0, "")
            revision = await mesh.store.put(PLAN_KEY, b'{"tiers": []}')
            answer = await stub.GetPlan(planner_pb2.GetPlanRequest())
            assert (answer.revision, answer.plan_json) == (revision, '{"tiers": []}')
