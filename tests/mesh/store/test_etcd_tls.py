"""An etcd that asks for certificates, and takes their common name for the user."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aetcd import rpc

from mesh.errors import StoreRefused, StoreUnavailable
from mesh.identity.authority import Authority, make_identities
from mesh.identity.identity import Identity
from mesh.identity.tls import transport_of
from mesh.runtime import Transport, system_runtime
from mesh.store import open_store
from tests.mesh.running_mesh import free_port
from tests.mesh.store.etcd_process import find_etcd

pytestmark = [pytest.mark.etcd, pytest.mark.process, pytest.mark.slow]


async def test_etcd_knows_processes_by_their_certificates(tmp_path: Path) -> None:
    binary = find_etcd()
    if binary is None:
        pytest.skip("no etcd binary; scripts/install_etcd.sh installs one")
    own = make_identities(tmp_path / "identity", "mesh", datetime.now(UTC))
    authority, now = Authority.open(own / "authority"), datetime.now(UTC)
    authority.issue(Identity("mesh", "store"), own / "etcd", now, hosts=("127.0.0.1",))
    port, peer_port = free_port(), free_port()
    url = f"https://127.0.0.1:{port}"
    command = [binary, "--data-dir", str(tmp_path / "data"), "--log-level", "error", "--client-cert-auth"]
    command += ["--trusted-ca-file", str(own / "etcd" / "ca.pem"), "--cert-file", str(own / "etcd" / "cert.pem")]
    command += [
        "--key-file",
        str(own / "etcd" / "key.pem"),
        "--listen-client-urls",
        url,
        "--advertise-client-urls",
        url,
    ]
    command += ["--listen-peer-urls", f"http://127.0.0.1:{peer_port}"]
    with (tmp_path / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 - it only starts
    try:
        operator = open_store(f"etcds://127.0.0.1:{port}", system_runtime(transport_of(str(own), "operator")))
        await operator.put("/penstock/config/policy", b"x", timeout_s=30)
        entry = await operator.get("/penstock/config/policy")
        assert entry is not None
        assert entry.value == b"x"
        await operator.close()
        for stranger in ("", str(make_identities(tmp_path / "strangers", "mesh", now))):
            store = open_store(
                f"etcd{'s' if stranger else ''}://127.0.0.1:{port}", system_runtime(transport_of(stranger, "worker"))
            )
            with pytest.raises(StoreUnavailable):
                await store.get("/penstock/config/policy", timeout_s=2)
            await store.close()
        await _let_workers_write_their_own(f"127.0.0.1:{port}", transport_of(str(own), "operator").to_others())
        worker = open_store(f"etcds://127.0.0.1:{port}", system_runtime(transport_of(str(own), "worker")))
        await worker.put("/penstock/members/worker/w-0", b"x", timeout_s=10)
        with pytest.raises(StoreRefused):
            await worker.put("/penstock/config/policy", b"y", timeout_s=10)
        await worker.close()
    finally:
        process.kill()
        process.wait()


async def _let_workers_write_their_own(endpoint: str, transport: Transport) -> None:
    """What docs/security.md says with etcdctl."""
    members = b"/penstock/members/worker/"
    permission = rpc.Permission(permType=rpc.Permission.READWRITE, key=members, range_end=members[:-1] + b"0")
    async with transport.channel(endpoint, (), ()) as channel:
        etcd = rpc.AuthStub(channel)
        for user in ("root", "worker"):
            await etcd.UserAdd(rpc.AuthUserAddRequest(name=user, options={"no_password": True}), timeout=10)
        await etcd.RoleAdd(rpc.AuthRoleAddRequest(name="worker"), timeout=10)
        await etcd.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="worker", perm=permission), timeout=10)
        for user in ("root", "worker"):
            await etcd.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=user, role=user), timeout=10)
        await etcd.AuthEnable(rpc.AuthEnableRequest(), timeout=10)
