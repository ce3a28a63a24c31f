"""A real Kubernetes control plane on loopback: etcd, kube-apiserver and kube-controller-manager."""

import json
import subprocess
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.in_time import eventually
from tests.kubernetes.api_server import UNANSWERED, ApiServer
from tests.mesh.running_mesh import free_port
from tests.mesh.store.etcd_process import EtcdProcess

BINARIES: Final = Path(__file__).resolve().parents[2] / ".kubernetes"
"""Where scripts/install_kubernetes.sh puts them."""
PROGRAMS: Final = ("kube-apiserver", "kube-controller-manager")
VERSION: Final = "1.20.2"
ADMIN, CONTROLLERS = "admin", "controllers"
"""Tokens."""
RUN_CONTROLLERS: Final = (
    "deployment", "replicaset", "statefulset", "job", "disruption", "garbagecollector", "serviceaccount",
    "serviceaccount-token", "root-ca-cert-publisher", "namespace",
)  # fmt: skip
"""Those that the chart's objects need. Nodes' are left out: nobody renews a lease for the one node."""
READY_S: Final = 120.0
DIES_WITH_ITS_PARENT: Final = ("setpriv", "--pdeathsig", "KILL", "--")


class Cluster:
    """Its parts may be ended and started again on their data."""

    def __init__(self, folder: Path, etcd: str) -> None:
        """`folder` holds keys and logs; `etcd`: the program."""
        self._folder = folder
        self._etcd = EtcdProcess(etcd, folder)
        self._port, self._controllers_port = free_port(), free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._controllers: subprocess.Popen[bytes] | None = None
        self.url = f"https://127.0.0.1:{self._port}"
        self.authority = folder / "apiserver.crt"
        """Which kube-apiserver makes at its first start."""
        self.kubeconfig = folder / "kubeconfig"
        self._service_accounts = folder / "service-accounts.pem"
        key = ec.generate_private_key(ec.SECP256R1())
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
        self._service_accounts.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        tokens = f"{ADMIN},admin,admin,system:masters\n{CONTROLLERS},system:kube-controller-manager,controllers\n"
        (folder / "tokens.csv").write_text(tokens)
        self.write_kubeconfig(self.kubeconfig, ADMIN, "default")

    def administrator(self) -> ApiServer:
        return ApiServer(self.url, ADMIN, self.authority)

    def start(self) -> None:
        """Return once it is ready."""
        self.start_store()
        self.start_server()
        controllers = self._folder / "controllers.kubeconfig"
        self.write_kubeconfig(controllers, CONTROLLERS, "default")
        self._controllers = self._run(
            "kube-controller-manager",
            f"--kubeconfig={controllers}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._controllers_port}",
            "--port=0",
            f"--cert-dir={self._folder / 'controllers'}",
            f"--controllers={','.join(RUN_CONTROLLERS)}",
            f"--service-account-private-key-file={self._service_accounts}",
            f"--root-ca-file={self.authority}",
            "--use-service-account-credentials",
            "--leader-elect=false",
        )

    def start_store(self) -> None:
        self._etcd.start()

    def kill_store(self) -> None:
        self._etcd.kill()

    def start_server(self) -> None:
        """Return once it is ready."""
        self._server = self._run(
            "kube-apiserver",
            f"--etcd-servers=http://{self._etcd.endpoint}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--advertise-address=10.0.0.1",
            f"--cert-dir={self._folder}",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self._service_accounts}",
            f"--service-account-key-file={self._service_accounts}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        )
        eventually(self._is_ready, READY_S, f"the API server is ready; see {self._folder}")

    def kill_server(self) -> None:
        """kill -9."""
        _kill(self._server)

    def stop(self) -> None:
        _kill(self._controllers)
        _kill(self._server)
        self._etcd.kill()

    def write_kubeconfig(self, path: Path, token: str, namespace: str) -> None:
        """JSON, which is YAML."""
        written = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [
                {"name": "tests", "cluster": {"server": self.url, "certificate-authority": str(self.authority)}}
            ],
            "users": [{"name": "tests", "user": {"token": token}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests", "namespace": namespace}}],
        }
        path.write_text(json.dumps(written))
        path.chmod(0o600)

    def _is_ready(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, f"kube-apiserver has ended; see {self._folder}"
        if not self.authority.exists():
            return False
        api = self.administrator()
        try:
            return api.get("/readyz") == "ok"
        except UNANSWERED:
            return False
        finally:
            api.close()

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{program}.log").open("ab") as log:
            command = (*DIES_WITH_ITS_PARENT, str(BINARIES / program), *arguments)
            return subprocess.Popen(command, stdout=log, stderr=log)


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()
