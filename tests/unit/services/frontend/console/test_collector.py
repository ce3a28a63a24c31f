"""One look at processes that answer, hang and are not there."""

import time

import pytest

from services.frontend.console.collector import Unanswered
from tests.unit.services.frontend.console.looks import ended
from tests.unit.services.frontend.console.processes import DEADLINE_S, processes

pytestmark = pytest.mark.live


async def test_an_empty_mesh_can_be_looked_at() -> None:
    async with processes() as mesh:
        look = await mesh.collector.look()
        assert look.members == ()
        assert look.snapshot == Unanswered("no scheduler has joined the mesh")
        assert look.deployments == []
        assert look.leaders == {}


async def test_who_answers_is_heard_and_who_cannot_is_named() -> None:
    async with processes() as mesh:
        await mesh.join("scheduler")
        await mesh.join("monitor")
        await mesh.join("planner")
        look = await mesh.collector.look()
        assert not isinstance(look.snapshot, Unanswered)
        assert not isinstance(look.cluster, Unanswered)
        assert look.unwell == {}
        assert isinstance(look.plans, Unanswered)
        assert "planner planner-0 at" in look.plans.why


async def test_a_scheduler_that_hangs_delays_nobody_and_another_one_is_asked() -> None:
    async with processes() as mesh:
        await mesh.join("scheduler", "a", is_hung=True)
        await mesh.join("scheduler", "b")
        began_s = time.monotonic()
        look = await mesh.collector.look()
        assert time.monotonic() - began_s < 10 * DEADLINE_S, "not for ever, however busy this machine is"
        assert isinstance(look.policies["a"], Unanswered)
        assert not isinstance(look.policies["b"], Unanswered)
        assert not isinstance(look.snapshot, Unanswered), "of b"


async def test_each_ended_request_is_heard_of_once_and_a_new_incarnation_from_its_beginning() -> None:
    async with processes() as mesh:
        frontend = await mesh.join("frontend")
        heard = []
        for ends in (2, 3, 3):
            frontend.ended = [ended(number) for number in range(1, ends + 1)]
            answer = (await mesh.collector.look()).ended["frontend-0"]
            assert not isinstance(answer, Unanswered)
            heard.append([each.number for each in answer.requests])
        assert heard == [[1, 2], [3], []]
        (member,) = mesh.directory.members("frontend")
        mesh.directory.leave(member)
        await mesh.join("frontend", incarnation_id="second", ended=[ended(1)])
        answer = (await mesh.collector.look()).ended["frontend-0"]
        assert not isinstance(answer, Unanswered)
        assert [each.number for each in answer.requests] == [1]


async def test_channels_to_processes_that_have_left_are_closed() -> None:
    async with processes() as mesh:
        await mesh.join("monitor")
        await mesh.collector.look()
        assert len(mesh.collector._channels) == 1
        mesh.directory.leave(mesh.directory.members("monitor")[0])
        await mesh.collector.look()
        assert mesh.collector._channels == {}
