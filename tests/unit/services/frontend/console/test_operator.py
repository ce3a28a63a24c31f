"""What operators' actions ask of whom."""

import json

import pytest

from controlplane.model.autoscale_record import AutoscalePolicy
from mesh.errors import PeerUnavailable, RpcError
from penstock.v1 import autoscale_pb2, frontend_pb2, member_pb2, planner_pb2, scheduler_pb2, worker_pb2
from services.frontend.console.actions import (
    Action,
    Drain,
    Migrate,
    Operator,
    RemoveAutoscale,
    Restart,
    SetAutoscale,
    SetGoal,
    SetPolicy,
    SetRescheduler,
)
from tests.unit.services.frontend.console.processes import processes

pytestmark = pytest.mark.live


async def test_policies_are_switched_at_the_scheduler() -> None:
    async with processes() as mesh:
        scheduler = await mesh.join("scheduler")
        operator = Operator(mesh.collector)
        done = await operator.carry_out(SetPolicy("linear", {"lambda": 0.7}))
        assert done.command == "penstock policy linear --set lambda=0.7"
        await operator.carry_out(SetRescheduler("current"))
        assert scheduler.asked == [
            scheduler_pb2.SetPolicyRequest(policy="linear", parameters={"lambda": 0.7}),
            scheduler_pb2.SetReschedulerRequest(mode="current"),
        ]


async def test_a_refusal_says_why() -> None:
    async with processes() as mesh:
        await mesh.join("scheduler", refuses="there is no such policy")
        with pytest.raises(RpcError, match="there is no such policy"):
            await Operator(mesh.collector).carry_out(SetPolicy("odd"))


async def test_drain_and_restart_reach_the_process_that_is_meant() -> None:
    async with processes() as mesh:
        worker, other = await mesh.join("worker", "a"), await mesh.join("worker", "b")
        operator = Operator(mesh.collector)
        done = await operator.carry_out(Drain("a"))
        assert "3 requests run on it" in done.message
        await operator.carry_out(Restart("worker", "a"))
        assert worker.asked == [
            worker_pb2.DrainRequest(migrate=True),
            member_pb2.RestartRequest(incarnation_id="first"),
        ]
        assert other.asked == []


async def test_a_request_is_moved_from_where_a_frontend_knows_it() -> None:
    async with processes() as mesh:
        frontend = await mesh.join("frontend")
        source, target = await mesh.join("worker", "a"), await mesh.join("worker", "b")
        frontend.running = [frontend_pb2.FrontendRequest(request_id="r", instance_id="a")]
        operator = Operator(mesh.collector)
        done = await operator.carry_out(Migrate("r", "b"))
        assert done.message == "r moved from a to b: 4 KV blocks in 2 rounds, paused for 1.5 ms"
        assert source.asked == [worker_pb2.MigrateRequest(request_id="r", target_instance_id="b")]
        assert target.asked == []
        source.moves = False
        with pytest.raises(RpcError, match="r stays on a: it has ended"):
            await operator.carry_out(Migrate("r", "b"))
        with pytest.raises(PeerUnavailable, match="may have ended"):
            await operator.carry_out(Migrate("another", "b"))


async def test_goals_go_to_the_planner_with_what_was_given() -> None:
    async with processes() as mesh:
        planner = await mesh.join("planner")
        await Operator(mesh.collector).carry_out(SetGoal("c", 4, ("a@h100",), quality=70.0))
        (request,) = planner.asked
        assert isinstance(request, planner_pb2.SetGoalRequest)
        assert (request.goal.quality, request.goal.HasField("latency_s"), request.goal.replan) == (70.0, False, True)


async def test_scales_are_set_and_removed_at_the_planner() -> None:
    async with processes() as mesh:
        planner = await mesh.join("planner")
        operator = Operator(mesh.collector)
        done = await operator.carry_out(SetAutoscale(AutoscalePolicy("m", ttft_ms=500.0, minimum=0)))
        assert done.command == "penstock autoscale set m --slo-ttft-ms 500 --minimum 0"
        done = await operator.carry_out(RemoveAutoscale("m"))
        assert (done.message, done.command) == ("m keeps the replicas that it has", "penstock autoscale remove m")
        planner.moves = False
        assert (await operator.carry_out(RemoveAutoscale("m"))).message == "m was not scaled"
        set_request = planner.asked[0]
        assert isinstance(set_request, autoscale_pb2.SetAutoscaleRequest)
        assert json.loads(set_request.policy_json) == {"model": "m", "ttft_ms": 500.0, "minimum": 0}
    async with processes() as mesh:
        await mesh.join("planner", refuses="no autoscale policy: it needs a TTFT, TPOT or e2e limit")
        with pytest.raises(RpcError, match="needs a TTFT"):
            await Operator(mesh.collector).carry_out(SetAutoscale(AutoscalePolicy("m")))


@pytest.mark.parametrize("action", [Drain("x"), Restart("worker", "x"), Restart("nothing", "x"), SetPolicy("penstock")])
async def test_nobody_there_is_said(action: Action) -> None:
    async with processes() as mesh:
        with pytest.raises(PeerUnavailable, match=r"there is no|no scheduler has joined"):
            await Operator(mesh.collector).carry_out(action)
