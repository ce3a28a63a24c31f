"""`penstock chaos` as a user runs it, in small."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.mesh.running_mesh import PENSTOCK

FIELDS = [
    *("streams", "finished", "new_requests", "failed", "lost", "duplicated", "wrong", "unfit", "recovered", "resumed"),
    *("gap_ms_p50", "gap_ms_max", "wait_ms_max", "healed", "engine", "fault", "seed"),
    *("pulled", "pulls_computed"),
]


@pytest.mark.parametrize("fault", ["restart", "delete-members", "wipe-store", "kill-frontend"])
def test_no_request_fails_without_its_control_plane(fault: str) -> None:
    options = ("--streams", "8", "--tokens", "200", f"--{fault}", "1")
    result = subprocess.run((*PENSTOCK, "chaos", *options), capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["failed"], report["fault"]) == (0, fault)
    assert report["new_requests"] > 0


def test_no_stream_is_lost_with_a_killed_decode_worker() -> None:
    options = ("--streams", "8", "--workers", "0", "--prefill", "1", "--decode", "2", "--tokens", "200", "--kill", "1")
    result = subprocess.run((*PENSTOCK, "chaos", *options), capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["finished"], report["lost"], report["duplicated"], report["wrong"]) == (8, 0, 0, 0)


def test_no_stream_is_wrong_whose_prefix_is_pulled_while_a_worker_is_killed() -> None:
    pytest.importorskip("ucxx", reason="KV transfers need UCX")
    options = ("--streams", "8", "--tokens", "150", "--shared-prefix", "1500", "--policy", "round_robin")
    options += ("--rate", "10", "--kill", "1")
    result = subprocess.run((*PENSTOCK, "chaos", *options), capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["failed"], report["wrong"]) == (0, 0)
    assert report["pulled"] > 0


def test_no_stream_is_lost_with_a_killed_worker(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--streams", "8", "--workers", "3", "--tokens", "120", "--kill", "1", "--json", str(out))
    result = subprocess.run((*PENSTOCK, "chaos", *options), capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    assert list(report) == FIELDS
    assert (report["finished"], report["lost"], report["duplicated"], report["wrong"]) == (8, 0, 0, 0)
    assert report["recovered"] >= 1
    assert report == json.loads(result.stdout)
