"""How a command in another shell finds the mesh that `penstock up` runs on this machine."""

import os
import tempfile
from pathlib import Path

import msgspec

from mesh.errors import ConfigurationError

STORE_VARIABLE = "PENSTOCK_STORE"


class RunFile(msgspec.Struct, frozen=True):
    """Addresses and process id of a mesh on this machine, left where commands look for them."""

    pid: int
    store_url: str
    http_url: str
    log_dir: str


def run_dir() -> Path:
    """A directory of this user's that outlives no reboot; created on first use."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "penstock" if base else Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{path} belongs to another user; set XDG_RUNTIME_DIR to a directory of yours")
    return path


def run_file_path(name: str) -> Path:
    """Path of the run file of the mesh called `name`."""
    return run_dir() / f"{name}.json"


def write_run_file(name: str, content: RunFile) -> None:
    """Write the run file. Raises `ConfigurationError` if another living mesh has the same name."""
    path = run_file_path(name)
    other = read_run_file(name)
    if other is not None and other.pid != content.pid:
        raise ConfigurationError(
            f"a mesh called {name!r} is already running (process {other.pid}, {other.http_url}); "
            "stop it with Ctrl-C in its shell, or choose another --name"
        )
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(content))
    fresh.replace(path)


def read_run_file(name: str) -> RunFile | None:
    """The mesh called `name`, or None if there is none; the file of a dead one counts as none.

    Raises ConfigurationError if the file holds something else.
    """
    try:
        content = msgspec.json.decode(run_file_path(name).read_bytes(), type=RunFile)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{run_file_path(name)} is no run file of a mesh ({error}); remove it") from error
    return content if _is_alive(content.pid) else None


def remove_run_file(name: str, pid: int) -> None:
    """Take the announcement back, unless another process has made one since."""
    content = read_run_file(name)
    if content is None or content.pid == pid:
        run_file_path(name).unlink(missing_ok=True)


def find_store_url(explicit: str | None, name: str) -> str:
    """The state store to talk to: an explicit URL, then PENSTOCK_STORE, then the local mesh's run file."""
    if explicit:
        return explicit
    if from_environment := os.environ.get(STORE_VARIABLE):
        return from_environment
    running = read_run_file(name)
    if running is None:
        raise ConfigurationError(
            f"no mesh called {name!r} runs on this machine; start one with `penstock up`, or name the state "
            f"store of another with --store or {STORE_VARIABLE} (for instance etcd://127.0.0.1:2379)"
        )
    return running.store_url


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
