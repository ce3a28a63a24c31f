"""How a command in another shell finds the mesh that `penstock up` runs on this machine."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mesh.errors import ConfigurationError
from mesh.identity.files import IDENTITY_VARIABLE

STORE_VARIABLE = "PENSTOCK_STORE"


class RunFile(msgspec.Struct, frozen=True):
    """Addresses and process id of a mesh on this machine, left where commands look for them."""

    pid: int
    store_url: str
    http_url: str
    log_dir: str
    identity: str = ""
    """Folder with a folder of each role's identity; empty: the mesh asks nobody who they are."""


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
            "stop it with Ctrl-C in its shell, or choose another --mesh"
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


def running_meshes() -> list[str]:
    """Names of the meshes that run on this machine and are this user's."""
    found = []
    for path in sorted(run_dir().glob("*.json")):
        try:
            if read_run_file(path.stem) is not None:
                found.append(path.stem)
        except ConfigurationError:
            continue  # another program's file
    return found


@dataclass(frozen=True, slots=True)
class FoundMesh:
    """What a command needs to talk to a mesh."""

    store_url: str
    identity: str
    """Folder of this process's identity, or one with a folder for each role; empty: none is needed."""


def find_mesh(store: str | None, name: str, identity: str = "") -> FoundMesh:
    """The mesh to talk to: an explicit store, then PENSTOCK_STORE, then the local mesh's run file. The identity is the
    given one, then PENSTOCK_IDENTITY, then that of the local mesh with this store. Raises ConfigurationError."""
    identity = identity or os.environ.get(IDENTITY_VARIABLE, "")
    if named := store or os.environ.get(STORE_VARIABLE):
        local = (read_run_file(each) for each in running_meshes())
        return FoundMesh(
            named, identity or next((each.identity for each in local if each and each.store_url == named), "")
        )
    running = read_run_file(name)
    if running is None:
        others = [other for other in running_meshes() if other != name]
        raise ConfigurationError(
            f"no mesh called {name!r} runs on this machine"
            + (f"; these do: --mesh {', --mesh '.join(others)}. Or" if others else ";")
            + f" start one with `penstock up`, or name the state "
            f"store of another with --store or {STORE_VARIABLE} (for instance etcd://127.0.0.1:2379)"
        )
    return FoundMesh(running.store_url, identity or running.identity)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
