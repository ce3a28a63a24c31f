import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
from prometheus_client import CollectorRegistry

from mesh import role as role_life
from mesh.exit_status import ExitStatus
from mesh.membership import ChangeKind, Directory, MemberChange
from mesh.role import RoleContext, RoleEnvironment, RoleSettings, run_role_in
from mesh.runtime import SystemClock, SystemEntropy, system_runtime
from mesh.shutdown import Shutdown
from mesh.store import open_store
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost

pytestmark = pytest.mark.live


class Idle:
    """A role that does nothing."""

    name: ClassVar[str] = "idle"

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        self.calls.append("start")
        context.on_new_address.append(self.calls.append)
        return {"http_address": f"{context.address.rpartition(':')[0]}:80", "model": "m"}

    async def failed(self) -> None:
        await asyncio.Event().wait()

    async def drain(self) -> None:
        self.calls.append("drain")

    async def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
async def host() -> AsyncIterator[StoreHost]:
    host = StoreHost(SystemClock(), SystemEntropy())
    yield host
    host.close()


def environment(host: StoreHost) -> RoleEnvironment:
    return RoleEnvironment(
        system_runtime(), EmbeddedStore(host), CollectorRegistry(), "127.0.0.1:1", 1, Shutdown(), supervised=False
    )


async def test_a_role_whose_name_is_taken_drains_and_ends_with_a_status_of_its_own(host: StoreHost) -> None:
    settings = RoleSettings("embedded:", "same")
    first, second, around = Idle(), Idle(), environment(host)
    first_life = asyncio.create_task(run_role_in(first, settings, environment(host)))
    directory = Directory(EmbeddedStore(host))
    await directory.start()
    await directory.wait_for("idle", 1, timeout_s=5)
    second_life = asyncio.create_task(run_role_in(second, settings, around))
    async with asyncio.timeout(10):
        assert await first_life == ExitStatus.SUPERSEDED
        assert first.calls == ["start", "drain", "stop"]
        around.shutdown.on_signal()
        assert await second_life == ExitStatus.STOPPED
    await directory.stop()


async def test_a_process_that_cannot_reach_the_store_ends_when_it_is_asked_to(host: StoreHost) -> None:
    role, around = Idle(), environment(host)
    away = replace(around, store=open_store("penstock://127.0.0.1:1", around.runtime))
    life = asyncio.create_task(run_role_in(role, RoleSettings("penstock://127.0.0.1:1", "alone"), away))
    around.shutdown.on_signal()
    async with asyncio.timeout(10):
        assert await life == ExitStatus.STOPPED
    assert role.calls == ["stop"]
    await away.store.close()


async def test_another_address_of_the_machine_is_announced_for_all_that_is_reached_there(
    host: StoreHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_life, "HOST_CHECK_S", 0.01)
    addresses = iter(["10.0.0.1", OSError("no name server"), "10.0.0.1"])

    def resolve() -> str:
        answer = next(addresses, "10.0.0.2")
        if isinstance(answer, OSError):
            raise answer
        return answer

    around = replace(environment(host), resolve_own_host=resolve)
    directory = Directory(EmbeddedStore(host))
    await directory.start()
    changes: asyncio.Queue[MemberChange] = asyncio.Queue()
    directory.subscribe(changes.put_nowait)
    role = Idle()
    life = asyncio.create_task(run_role_in(role, RoleSettings("embedded:", "one", bind_host="0.0.0.0"), around))
    async with asyncio.timeout(10):
        before, after = await changes.get(), await changes.get()
        around.shutdown.on_signal()
        assert await life == ExitStatus.STOPPED
        assert (await changes.get()).kind is ChangeKind.LEFT
    assert (before.kind, after.kind) == (ChangeKind.JOINED, ChangeKind.CHANGED)
    port = before.member.address.rpartition(":")[2]
    assert before.member.address == f"10.0.0.1:{port}"
    assert role.calls == ["start", f"10.0.0.2:{port}", "drain", "stop"]
    assert before.member.attributes["http_address"] == "10.0.0.1:80"
    assert after.member == replace(
        before.member,
        address=f"10.0.0.2:{port}",
        metrics_address="10.0.0.2:1",
        attributes={"pid": "1", "http_address": "10.0.0.2:80", "model": "m"},
    )
    await directory.stop()
