"""What an instance's container is made of."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.cli.carriers.carried import names_here
from services.cli.carriers.container import ContainerSettings, container_config, read_paths
from services.cli.carriers.docker_engine import log_pieces
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.local_mesh import LocalMesh, ModelSpec, own_workers, parse_attached, processes

SETTINGS = ContainerSettings(
    "m",
    "/run/m",
    "image",
    "7:8",
    {"PENSTOCK_SERVE_WORKER_KV_PORT": "1", "PENSTOCK_PARENT_PID": "9", "AWS_SECRET": "s", "PATH": "/bin"},
)
MESH = LocalMesh(
    models=(ModelSpec("chat", Path("/models/chat"), 2),),
    engine="simulated",
    engine_args=("seed=1",),
    store_url="penstock://127.0.0.1:1",
    http_host="127.0.0.1",
    http_port=8000,
    identity="/run/m/identity",
    attached=(parse_attached("http://127.0.0.1:9"),),
)


def test_it_reads_its_model_and_its_identity_and_no_other_role_s() -> None:
    spec = own_workers(MESH)[0]
    config = container_config(spec, SETTINGS)
    assert config["Cmd"] == ["serve", "worker", *spec.arguments]
    mounts = {mount["Source"]: mount for mount in config["HostConfig"]["Mounts"]}
    assert set(mounts) == {"/models/chat", "/run/m/identity/worker"}
    assert all(mount["ReadOnly"] and mount["Target"] == source for source, mount in mounts.items())
    assert config["Labels"] == {
        "io.penstock.owner": "/run/m",
        "io.penstock.instance": spec.name,
        "io.penstock.model": "chat",
    }


def test_settings_are_passed_on_and_secrets_of_others_are_not() -> None:
    spec = ProcessSpec("w", "worker", (), {"CUDA_VISIBLE_DEVICES": "2,3", "PENSTOCK_X": "y"})
    environment = dict(line.split("=", 1) for line in container_config(spec, SETTINGS)["Env"])
    assert set(environment) == {"PENSTOCK_SERVE_WORKER_KV_PORT", "PENSTOCK_X", "HOME", "USER"}


def test_its_gpus_are_given_by_the_engine_which_counts_them_anew_inside() -> None:
    spec = ProcessSpec("w", "worker", (), {"CUDA_VISIBLE_DEVICES": "2,3"})
    (asked,) = container_config(spec, SETTINGS)["HostConfig"]["DeviceRequests"]
    assert asked["DeviceIDs"] == ["2", "3"]
    assert "DeviceRequests" not in container_config(ProcessSpec("w", "worker", ()), SETTINGS)["HostConfig"]


def test_links_of_a_checkpoint_lead_to_files_inside_too(tmp_path: Path) -> None:
    """As in the Hub's cache, whose snapshots are links into its blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("a", "b"):
        (blobs / name).write_text(name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    spec = ProcessSpec("w", "worker", ("--model-path", str(snapshot), "--engine", "simulated"))
    assert read_paths(spec) == (snapshot, blobs)


def test_a_model_of_the_hub_s_name_is_no_folder() -> None:
    assert read_paths(ProcessSpec("w", "worker", ("--model-path", "Qwen/Qwen3-0.6B"))) == ()


def test_all_but_the_engines_stays_here() -> None:
    here = names_here(MESH)
    assert here == {spec.name for spec in processes(MESH)} - {"chat-0", "chat-1"}
    assert {"frontend", "scheduler", "attached-0"} <= here


@given(st.lists(st.binary()), st.binary(max_size=7))
def test_a_log_is_what_was_written(pieces: list[bytes], cut: bytes) -> None:
    log = b"".join(b"\x01\0\0\0" + len(piece).to_bytes(4, "big") + piece for piece in pieces)
    assert list(log_pieces(log + cut)) == pieces


@given(st.binary())
def test_no_log_is_too_odd_to_read(log: bytes) -> None:
    assert sum(map(len, log_pieces(log))) <= len(log)
