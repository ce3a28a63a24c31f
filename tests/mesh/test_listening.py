"""A local mesh is reached from its own machine only, as the kernel's list of sockets says."""

from tests.kv.test_listening import listening
from tests.mesh.running_mesh import RunningMesh

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}
"""gRPC binds the second, which is the first in a socket of IPv6."""


def test_no_process_of_a_local_mesh_listens_on_a_network(mesh: RunningMesh) -> None:
    pids = {role["member_id"]: int(role["attributes"]["pid"]) for role in mesh.status()["roles"]}
    heard = {name: listening(pid) for name, pid in pids.items()}
    workers = [name for name in heard if name.startswith("demo-large")]
    # Its gRPC server, its metrics, its KV transfer agent and the socket of UCX that the blocks come in at.
    assert workers
    assert all(len(heard[name]) >= 4 for name in workers), heard
    assert {host for sockets in heard.values() for host, _ in sockets} <= LOOPBACK, heard
