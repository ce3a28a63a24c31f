"""`penstock ca`, as somebody types it."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mesh.errors import ConfigurationError
from mesh.identity.identity import ROLES
from services.cli.main import penstock


def ca(*arguments: str) -> Result:
    """Raises what the command raises."""
    return CliRunner().invoke(penstock, ["ca", *arguments], catch_exceptions=False)


def test_an_authority_and_identities_are_made_and_shown(tmp_path: Path) -> None:
    folder = str(tmp_path / "identity")
    assert "spiffe://prod/" in ca("init", "--folder", folder, "--trust-domain", "prod").output
    out = str(tmp_path / "gpu-1")
    issued = ca("issue", "worker", "--folder", folder, "--name", "gpu-1-0", "--days", "7", "--out", out)
    assert "spiffe://prod/worker/gpu-1-0, for 7 days" in issued.output
    shown = json.loads(ca("show", out, "--json").output)
    assert (shown["role"], shown["name"], shown["trust_domain"]) == ("worker", "gpu-1-0", "prod")
    assert "spiffe://prod/worker/gpu-1-0 until" in ca("show", out).output
    with pytest.raises(ConfigurationError, match="has an authority already"):
        ca("init", "--folder", folder)
    with pytest.raises(ConfigurationError, match="there is no identity in"):
        ca("show", folder)


def test_all_roles_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    ca("init", "--folder", str(folder), "--issue")
    assert {path.name for path in folder.iterdir()} == {*ROLES, "authority"}


def test_only_what_is_missing_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    hosts = ("--store-host", "etcd", "--store-host", "127.0.0.1")

    def ensure(*arguments: str) -> list[str]:
        """The roles that were issued an identity."""
        lines = ca("ensure", "--folder", str(folder), *arguments).output.splitlines()
        return [Path(line.split(":")[0]).name for line in lines if not line.endswith("is good")]

    assert ensure(*hosts) == list(ROLES)
    assert ensure(*hosts) == []
    assert ensure("--store-host", "etcd-1") == ["store"]
    (folder / "worker" / "key.pem").unlink()
    assert ensure() == ["worker"]
    assert ensure("--days", "300") == list(ROLES), "of 90 days, too few are left of 300"
    shutil.copytree(folder / "monitor", folder / "planner", dirs_exist_ok=True)
    assert ensure("--days", "300") == ["planner"], "it was somebody else's"
    shutil.rmtree(folder / "authority")
    assert ensure() == list(ROLES), "those of another authority"


def test_the_table_of_doors_is_printed() -> None:
    printed = ca("doors").output.splitlines()
    assert any(line.split() == ["penstock.v1.Worker/Drain", "operator"] for line in printed)
    table = json.loads(ca("doors", "--json").output)
    assert table["methods"]["penstock.v1.Worker/Stream"] == ["frontend", "operator"]
    assert table["keys"]["/penstock/members/ROLE/"] == ["ROLE", "operator"]


def test_grpcurl_needs_no_certificate_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_IDENTITY", raising=False)
    assert ca("grpcurl", "--store", "etcd://127.0.0.1:1").output == "-plaintext\n"
