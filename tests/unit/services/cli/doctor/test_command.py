"""`penstock doctor` on this very machine."""

import json
import socket

import pytest
from click.testing import CliRunner

from services.cli.main import penstock


@pytest.fixture
def no_mesh(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)


@pytest.mark.process
def test_a_port_that_is_taken_is_a_warning_and_a_store_that_is_away_a_failure(no_mesh: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as closed:
        port, nobody = taken.getsockname()[1], closed.getsockname()[1]
        closed.close()
        asked = ["doctor", "--json", "--port", str(port), "--store", f"penstock://127.0.0.1:{nobody}"]
        done = CliRunner().invoke(penstock, asked)
    told = json.loads(done.stdout)
    by_check = {finding["check"]: finding for finding in told["findings"]}
    assert by_check["port"]["level"] == "warning"
    assert str(port) in by_check["port"]["found"]
    assert by_check["state store"]["level"] == "problem"
    assert told["problems"] >= 1
    assert told["facts"]["cpus"] >= 1
    assert done.exit_code == 1
