"""A real etcd on loopback that tests may kill and restart on the same data directory."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.mesh.running_mesh import free_port


def find_etcd() -> str | None:
    """The etcd on PATH, or the one that scripts/install_etcd.sh put beside this Python."""
    return shutil.which("etcd") or shutil.which("etcd", path=str(Path(sys.executable).parent))


class EtcdProcess:
    """One member; `start` after `kill` continues on the same data and port."""

    def __init__(self, binary: str, directory: Path) -> None:
        self._binary = binary
        self.directory = directory
        self.data = directory / "data"
        self.port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        command = [self._binary, "--name", "test", "--data-dir", str(self.data), "--log-level", "error"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += [
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"test={peer}",
        ]
        # Short elections: quick restarts, and leases of one second.
        command += ["--heartbeat-interval", "10", "--election-timeout", "100"]
        with (self.directory / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop it without closing its connections; returns once it stands."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
