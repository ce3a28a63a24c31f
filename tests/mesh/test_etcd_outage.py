"""A mesh over a real etcd that goes away for longer than the membership leases live."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from mesh.membership import LEASE_TTL_S
from tests.in_time import eventually, still
from tests.mesh.running_mesh import RunningMesh
from tests.mesh.store.etcd_process import EtcdProcess, find_etcd

OUTAGE_S = LEASE_TTL_S + 3.0
ROLES = 9

pytestmark = pytest.mark.etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    binary = find_etcd()
    if binary is None:
        pytest.skip("no etcd on PATH or beside this Python; scripts/install_etcd.sh installs one")
    process = EtcdProcess(binary, tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def mesh_on_etcd(etcd: EtcdProcess, tmp_path: Path) -> Iterator[RunningMesh]:
    running = RunningMesh(tmp_path, "--engine", "simulated", "--store", f"etcd://{etcd.endpoint}")
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def test_serving_goes_on_and_everyone_announces_itself_again(mesh_on_etcd: RunningMesh, etcd: EtcdProcess) -> None:
    # Serving needs neither planner nor predictor, so they may still be on their way.
    eventually(lambda: len(mesh_on_etcd.status()["roles"]) == ROLES, 60, "every role is announced")
    before = {role["member_id"]: role["incarnation_id"] for role in mesh_on_etcd.status()["roles"]}
    client = OpenAI(base_url=f"{mesh_on_etcd.url}/v1", api_key="none", max_retries=0, timeout=20)
    etcd.kill()
    until_s = time.monotonic() + OUTAGE_S
    served = 0
    while time.monotonic() < until_s:
        stream = client.completions.create(model="demo-large", prompt="while etcd is away", max_tokens=50, stream=True)
        served += sum(1 for _ in stream) > 0
    still(served >= 5, "several streams are served during the outage")
    etcd.start()

    def whole_again() -> bool:
        status = mesh_on_etcd.status()
        after = {role["member_id"]: role["incarnation_id"] for role in status["roles"] if role["lease"]}
        return after == before and [instance["state"] for instance in status["instances"]] == ["ready"] * 3

    eventually(whole_again, 60, "all members are announced again, under the same incarnations")
    client.completions.create(model="demo-large", prompt="etcd is back", max_tokens=5)
