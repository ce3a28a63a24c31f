import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import ClassVar

import pytest
from prometheus_client import CollectorRegistry

from mesh.ending import Ending, ExitStatus
from mesh.membership import Directory
from mesh.role import RoleContext, RoleSettings, Surroundings, live
from mesh.runtime import SystemClock, SystemEntropy, system_runtime
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost


class Idle:
    """A role that does nothing."""

    name: ClassVar[str] = "idle"

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        self.calls.append("start")
        return {}

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


def surroundings(host: StoreHost) -> Surroundings:
    return Surroundings(
        system_runtime(), EmbeddedStore(host), CollectorRegistry(), "127.0.0.1:1", 1, Ending(), supervised=False
    )


async def test_a_role_whose_name_is_taken_drains_and_ends_with_a_status_of_its_own(host: StoreHost) -> None:
    settings = RoleSettings("embedded:", "same")
    first, second, around = Idle(), Idle(), surroundings(host)
    first_life = asyncio.create_task(live(first, settings, surroundings(host)))
    directory = Directory(EmbeddedStore(host))
    await directory.start()
    await directory.wait_for("idle", 1, timeout_s=5)
    second_life = asyncio.create_task(live(second, settings, around))
    async with asyncio.timeout(10):
        assert await first_life == ExitStatus.SUPERSEDED
        assert first.calls == ["start", "drain", "stop"]
        around.ending.on_signal()
        assert await second_life == ExitStatus.STOPPED
    await directory.stop()
