"""Who decodes a request is asked of one scheduler after another, as they come and go."""

import asyncio
from typing import Any, cast

import pytest

from controlplane.model.instance import InstanceDescription
from controlplane.protocols.migration.source_events import DecodeChosen
from engine_worker.coordinator.decode_inquirer import DecodeInquirer
from mesh.leadership_state import Fence
from mesh.membership import Member
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.unit.engine_worker.worker.fake_engine import make_request

pytestmark = pytest.mark.live


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Answers with its own name, once it may."""

    def __init__(self, name: str, *, answers: bool, leader_id: str = "", epoch: int = 0) -> None:
        self._leader_id = leader_id
        self._epoch = epoch
        self.asked = asyncio.Event()
        self._answers = answers
        self._server = RpcServer(GrpcTransport())
        self._server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, self, "penstock.v1.Scheduler")
        self.member = Member("scheduler", name, "1", self._server.address, "")

    async def __aenter__(self) -> "Scheduler":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def PlaceDecode(self, request: scheduler_pb2.PlaceDecodeRequest, context: Any) -> Any:
        self.asked.set()
        if not self._answers:
            await asyncio.Event().wait()
        if self._leader_id not in ("", self.member.member_id):
            return scheduler_pb2.PlaceDecodeResponse(leader_id=self._leader_id)
        answer = scheduler_pb2.PlaceDecodeResponse(instance_id=self.member.member_id, leader_id=self._leader_id)
        if self._epoch:
            answer.fencing.duty, answer.fencing.epoch, answer.fencing.leader = "pools", self._epoch, self._leader_id
        return answer


class Directory:
    def __init__(self, member: Member, *others: Member) -> None:
        self.member = member
        self.others = others

    def members(self, role: str) -> tuple[Member, ...]:
        return (self.member, *self.others)


async def test_whoever_waits_for_a_scheduler_that_is_replaced_hears_of_it() -> None:
    here = InstanceDescription("a", "1", "127.0.0.1:1", "m", "/none", "simulated", 16, 100, 4096, 8, 512)
    async with Scheduler("one", answers=False) as one, Scheduler("two", answers=True) as two:
        directory = Directory(one.member)
        inquiries = DecodeInquirer(cast(Any, directory), GrpcTransport(), Fence())
        waiting = asyncio.create_task(inquiries.ask(make_request("r"), here))
        await one.asked.wait()
        directory.member = two.member
        assert await inquiries.ask(make_request("s"), here) == DecodeChosen("s", "two")
        assert await waiting == DecodeChosen("r", "", "scheduler one left before it answered")
        await inquiries.close()


async def test_a_caller_that_is_cancelled_is_cancelled() -> None:
    here = InstanceDescription("a", "1", "127.0.0.1:1", "m", "/none", "simulated", 16, 100, 4096, 8, 512)
    async with Scheduler("one", answers=False) as one:
        inquiries = DecodeInquirer(cast(Any, Directory(one.member)), GrpcTransport(), Fence())
        waiting = asyncio.create_task(inquiries.ask(make_request("r"), here))
        await one.asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await inquiries.close()


async def test_a_scheduler_that_stands_by_names_the_leader_and_the_leaders_word_counts() -> None:
    here = InstanceDescription("a", "1", "127.0.0.1:1", "m", "/none", "simulated", 16, 100, 4096, 8, 512)
    fence = Fence()
    async with (
        Scheduler("one", answers=True, leader_id="two") as one,
        Scheduler("two", answers=True, leader_id="two", epoch=7) as two,
    ):
        inquiries = DecodeInquirer(cast(Any, Directory(one.member, two.member)), GrpcTransport(), fence)
        assert await inquiries.ask(make_request("r"), here) == DecodeChosen("r", "two")
        assert fence.highest("pools") == 7
        one.asked.clear()
        assert await inquiries.ask(make_request("s"), here) == DecodeChosen("s", "two")
        assert not one.asked.is_set(), "who answered last is asked first"
        fence.check("pools", 8, "three")
        assert "three" in (await inquiries.ask(make_request("t"), here)).error
        await inquiries.close()


async def test_where_one_scheduler_is_gone_another_one_is_asked() -> None:
    here = InstanceDescription("a", "1", "127.0.0.1:1", "m", "/none", "simulated", 16, 100, 4096, 8, 512)
    async with Scheduler("one", answers=True) as one, Scheduler("two", answers=True) as two:
        await one.__aexit__()
        inquiries = DecodeInquirer(cast(Any, Directory(one.member, two.member)), GrpcTransport(), Fence())
        assert await inquiries.ask(make_request("r"), here) == DecodeChosen("r", "two")
        await inquiries.close()
