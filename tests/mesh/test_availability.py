"""No request of a real mesh fails for what happens to its control plane. Each test restores what it broke."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI

from mesh.membership import GRACE_S, MEMBERS_PREFIX, Member
from mesh.run_file import RunFile
from mesh.runtime import system_runtime
from mesh.store import StateStore, open_store
from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh

REQUESTS_S = 4
CUT_S = 16.0
"""Longer than a connection lives whose other end does not answer."""


class Requests:
    """New short requests at a steady rate, until told to stop."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=30)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.served: list[str] = []
        """The instance of each."""
        self.failures: list[Exception] = []
        self._pace = threading.Thread(target=self._run)
        self._pace.start()

    def _run(self) -> None:
        while not self._stop.wait(1 / REQUESTS_S):
            thread = threading.Thread(target=self._one)
            thread.start()
            self._threads.append(thread)

    def _one(self) -> None:
        try:
            raw = self._client.completions.with_raw_response.create(model="demo-large", prompt="x", max_tokens=20)
            self.served.append(raw.headers["x-penstock-instance"])
        except openai.OpenAIError as error:
            self.failures.append(error)

    def stop(self) -> None:
        self._stop.set()
        self._pace.join()
        for thread in self._threads:
            thread.join(30)


@contextmanager
def requests_to(mesh: RunningMesh) -> Iterator[Requests]:
    """Requests while the block runs, none of which may fail."""
    requests = Requests(mesh)
    try:
        yield requests
    finally:
        requests.stop()
    assert not requests.failures, f"{len(requests.failures)} failed: {requests.failures[0]}"
    assert requests.served


@pytest.fixture
def whole_mesh(mesh: RunningMesh) -> Iterator[RunningMesh]:
    """The shared mesh with all three instances ready, before and after."""

    def all_ready() -> bool:
        return list(mesh.instances().values()) == ["ready"] * 3

    eventually(all_ready, 60, "all instances are ready")
    yield mesh
    eventually(all_ready, 60, "all instances are ready again")


def members_of(mesh: RunningMesh) -> dict[str, Member]:
    """By key, as they stand in the store."""

    async def read(store: StateStore) -> dict[str, Member]:
        listing = await store.range(MEMBERS_PREFIX)
        return {entry.key: msgspec.json.decode(entry.value, type=Member) for entry in listing.entries if entry.value}

    members: dict[str, Member] = with_store(mesh, read)
    return members


def with_store(mesh: RunningMesh, work: Any) -> Any:
    """What `work` returns, given the mesh's store."""
    run_file = msgspec.json.decode((mesh.log_dir.parent.parent / "default.json").read_bytes(), type=RunFile)

    async def opened() -> Any:
        store = open_store(run_file.store_url, system_runtime())
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(opened())


def test_all_member_keys_are_deleted_and_no_request_fails(whole_mesh: RunningMesh) -> None:
    before = members_of(whole_mesh)
    with requests_to(whole_mesh):
        for _ in range(2):
            with_store(whole_mesh, lambda store: store.delete_prefix(MEMBERS_PREFIX))
            eventually(lambda: members_of(whole_mesh).keys() == before.keys(), 60, "all members announce themselves")
        time.sleep(GRACE_S + 1)  # longer than a member whose record is gone is waited for
    after = members_of(whole_mesh)
    assert {key: member.incarnation_id for key, member in after.items()} == {
        key: member.incarnation_id for key, member in before.items()
    }


def test_no_request_fails_while_nobody_reports_to_a_monitor_nor_when_it_goes_on(whole_mesh: RunningMesh) -> None:
    pid = whole_mesh.pid("monitor")
    with requests_to(whole_mesh) as requests:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(CUT_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: list(whole_mesh.instances().values()) == ["ready"] * 3, 60, "all instances are ready")
    assert len(requests.served) > REQUESTS_S * CUT_S / 2


def test_no_request_fails_while_the_monitor_dies_again_and_again(whole_mesh: RunningMesh) -> None:
    with requests_to(whole_mesh):
        for _ in range(3):
            pid = whole_mesh.pid("monitor")
            os.kill(pid, signal.SIGKILL)
            eventually(lambda dead=pid: monitor_pid(whole_mesh) not in (0, dead), 60, "the monitor is started again")


def monitor_pid(mesh: RunningMesh) -> int:
    """0 while the store knows no monitor."""
    pids = [int(member.attributes["pid"]) for member in members_of(mesh).values() if member.role == "monitor"]
    return max(pids, default=0)
