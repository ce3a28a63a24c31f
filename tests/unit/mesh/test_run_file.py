import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.errors import ConfigurationError
from mesh.run_file import (
    RunFile,
    find_mesh,
    read_run_file,
    remove_run_file,
    run_dir,
    run_file_path,
    write_run_file,
)


@pytest.fixture(autouse=True)
def own_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)


def running(pid: int) -> RunFile:
    return RunFile(pid, "penstock://127.0.0.1:1", "http://127.0.0.1:8000", "logs")


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_another_shell_finds_the_mesh() -> None:
    write_run_file("default", running(os.getpid()))
    assert find_mesh(None, "default").store_url == "penstock://127.0.0.1:1"
    remove_run_file("default", os.getpid())
    assert read_run_file("default") is None


def test_explicit_then_environment_then_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write_run_file("default", running(os.getpid()))
    monkeypatch.setenv("PENSTOCK_STORE", "etcd://127.0.0.1:2379")
    assert find_mesh(None, "default").store_url == "etcd://127.0.0.1:2379"
    assert find_mesh("embedded:", "default").store_url == "embedded:"


def test_an_identity_is_given_or_of_the_environment_or_the_meshs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSTOCK_IDENTITY", raising=False)
    mesh = RunFile(os.getpid(), "penstock://127.0.0.1:1", "http://127.0.0.1:8000", "logs", "/run/identity")
    write_run_file("default", mesh)
    assert find_mesh(None, "default").identity == "/run/identity"
    assert find_mesh("penstock://127.0.0.1:1", "default").identity == "/run/identity", "its store has been named"
    assert find_mesh("etcd://127.0.0.1:2379", "default").identity == "", "that mesh is another one"
    monkeypatch.setenv("PENSTOCK_IDENTITY", "/etc/identity")
    assert find_mesh(None, "default").identity == "/etc/identity"
    assert find_mesh(None, "default", "here").identity == "here"


def test_no_mesh_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="penstock up"):
        find_mesh(None, "default")


@pytest.mark.live
def test_a_dead_mesh_counts_as_none_and_is_replaced() -> None:
    write_run_file("default", running(dead_pid()))
    assert read_run_file("default") is None
    write_run_file("default", running(os.getpid()))
    assert read_run_file("default") is not None


def test_two_living_meshes_need_two_names() -> None:
    write_run_file("default", running(os.getppid()))
    with pytest.raises(ConfigurationError, match="--mesh"):
        write_run_file("default", running(os.getpid()))


def test_only_the_owner_removes_its_file() -> None:
    write_run_file("default", running(os.getppid()))
    remove_run_file("default", os.getpid())
    assert run_file_path("default").exists()


def test_a_file_that_holds_something_else_is_named() -> None:
    run_file_path("m").write_text("garbage")
    with pytest.raises(ConfigurationError, match="remove it"):
        read_run_file("m")


def test_who_names_no_running_mesh_is_told_which_there_are() -> None:
    write_run_file("mine", running(os.getpid()))
    (run_dir() / "other.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"these do: --mesh mine\. Or start one"):
        find_mesh(None, "default")
    remove_run_file("mine", os.getpid())
    with pytest.raises(ConfigurationError, match="'default' runs on this machine; start one"):
        find_mesh(None, "default")
