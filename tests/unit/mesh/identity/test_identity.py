"""Names in certificates, the table of doors, and the folder that holds an identity."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool
from hypothesis import given
from hypothesis import strategies as st

import penstock.v1
from mesh.errors import ConfigurationError
from mesh.identity.authority import Authority, make_identities
from mesh.identity.doors import DOORS, SERVICES, may_call, may_write
from mesh.identity.files import IdentityFolder, own_folder
from mesh.identity.identity import ROLES, Identity, the_identity
from mesh.identity.tls import transport_of
from tests.unit.mesh.identity.identities import NOW, an_authority, issued

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)
OUTSIDE = {"Parser"}
"""Served on a socket in a folder of one process's alone."""


@given(st.from_regex(r"[a-z0-9._-]{1,20}", fullmatch=True), st.sampled_from(ROLES), st.just("") | NAMES)
def test_an_identity_is_read_back_from_its_uri(trust_domain: str, role: str, name: str) -> None:
    identity = Identity(trust_domain, role, name)
    assert Identity.parse(identity.uri) == identity
    assert the_identity(["worker.penstock", identity.uri]) == identity


@given(st.text(max_size=40))
def test_any_text_is_an_identity_or_refused(text: str) -> None:
    for uri in (text, f"spiffe://{text}", f"spiffe://mesh/{text}"):
        try:
            assert Identity.parse(uri).uri == uri
        except ConfigurationError:
            assert the_identity([uri]) is None


def test_a_certificate_of_two_names_is_nobodys() -> None:
    assert the_identity(["spiffe://mesh/worker", "spiffe://mesh/operator"]) is None
    assert the_identity(["worker.penstock"]) is None


def test_the_table_names_every_method_of_every_service() -> None:
    pool, served = descriptor_pool.Default(), {}
    for path in (Path(folder) for folder in penstock.v1.__path__):
        for module in sorted(path.glob("*_pb2.py")):
            __import__(f"penstock.v1.{module.stem}")
            file = pool.FindFileByName(f"penstock/v1/{module.stem.removesuffix('_pb2')}.proto")
            for service in file.services_by_name.values():
                if service.full_name.startswith("penstock.v1.") and service.name not in OUTSIDE:
                    served[service.name] = {method.name for method in service.methods}
    assert {service: set(methods) for service, methods in SERVICES.items()} == {
        name: methods for name, methods in served.items() if name != "ExternalProcessor"
    }


@pytest.mark.parametrize(
    ("role", "method", "may"),
    [
        ("frontend", "Worker/Stream", True),
        ("worker", "Worker/Stream", False),
        ("scheduler", "Worker/Stream", False),
        ("frontend", "Worker/Drain", False),
        ("operator", "Worker/Drain", True),
        ("scheduler", "Worker/Migrate", True),
        ("frontend", "Scheduler/SetPolicy", False),
        ("operator", "Scheduler/SetPolicy", True),
        ("worker", "Monitor/Report", True),
        ("frontend", "Monitor/Report", False),
        ("envoy", "State/Range", False),
        ("operator", "Worker/NoSuchMethod", False),
    ],
)
def test_who_may_call_what(role: str, method: str, may: bool) -> None:
    assert may_call(Identity("mesh", role), f"/penstock.v1.{method}") is may


def test_health_is_told_to_every_member() -> None:
    assert DOORS["/grpc.health.v1.Health/Check"] == set(ROLES)


@pytest.mark.parametrize(
    ("identity", "key", "may"),
    [
        (Identity("mesh", "worker"), "/penstock/members/worker/a", True),
        (Identity("mesh", "worker", "a"), "/penstock/members/worker/a", True),
        (Identity("mesh", "worker", "b"), "/penstock/members/worker/a", False),
        (Identity("mesh", "worker"), "/penstock/members/scheduler/a", False),
        (Identity("mesh", "worker"), "/penstock/members/", False),
        (Identity("mesh", "worker"), "/penstock/members/workers/a", False),
        (Identity("mesh", "worker"), "/penstock/config/policy", False),
        (Identity("mesh", "worker"), "/", False),
        (Identity("mesh", "scheduler"), "/penstock/config/policy", True),
        (Identity("mesh", "scheduler"), "/penstock/", False),
        (Identity("mesh", "frontend"), "/penstock/leaders/pools", False),
        (Identity("mesh", "operator"), "/", True),
    ],
)
def test_who_may_write_what(identity: Identity, key: str, may: bool) -> None:
    assert may_write(identity, key) is may


def test_an_authority_signs_in_its_own_name_only(tmp_path: Path) -> None:
    authority = an_authority(tmp_path)
    with pytest.raises(ConfigurationError, match="signs for spiffe://mesh/ only"):
        authority.issue(Identity("other", "worker"), tmp_path / "x", NOW)
    with pytest.raises(ConfigurationError, match="has an authority already"):
        Authority.create(authority.folder, "mesh", NOW)
    assert Authority.open(authority.folder).trust_domain == "mesh"
    (authority.folder / "ca.pem").write_bytes(an_authority(tmp_path, "another").folder.joinpath("ca.pem").read_bytes())
    with pytest.raises(ConfigurationError, match="do not fit together"):
        Authority.open(authority.folder)


def test_what_is_secret_is_its_owners_alone(tmp_path: Path) -> None:
    folder = make_identities(tmp_path / "all", "mesh", NOW)
    secrets = [*folder.rglob("*key.pem")]
    assert len(secrets) == len(ROLES) + 1
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "worker" / "key.pem").chmod(0o644)
    with pytest.raises(ConfigurationError, match="others may read or change"):
        IdentityFolder(folder / "worker")


def test_a_process_finds_its_own_identity_or_is_told_why_not(tmp_path: Path) -> None:
    folder = make_identities(tmp_path / "all", "mesh", NOW)
    assert own_folder(str(folder), "worker") == folder / "worker"
    own = transport_of(str(folder), "worker").identity
    assert own == Identity("mesh", "worker")
    assert transport_of("", "worker").identity is None
    with pytest.raises(ConfigurationError, match="this process is a frontend"):
        transport_of(str(folder / "worker"), "frontend")
    with pytest.raises(ConfigurationError, match="there is no identity in"):
        transport_of(str(tmp_path), "worker")


def test_renewed_files_are_used_and_wrong_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = an_authority(tmp_path)
    path = issued(authority, tmp_path / "worker", "worker")
    folder = IdentityFolder(path)
    first = folder.credentials()
    assert folder.credentials() is first
    issued(authority, path, "worker", days=2)
    second = folder.credentials()
    assert second.expires - first.expires == timedelta(days=1)
    # Half replaced: the new key is there, the new certificate is not yet.
    other = issued(authority, tmp_path / "other", "worker", days=3)
    os.replace(other / "key.pem", path / "key.pem")
    assert folder.credentials() is second
    assert "is not used" in caplog.text
    os.replace(other / "cert.pem", path / "cert.pem")
    assert folder.credentials().expires - first.expires == timedelta(days=2)
    # Somebody else's.
    third = folder.credentials()
    issued(authority, path, "operator")
    assert folder.credentials() is third
    assert "somebody else's" in caplog.text


def test_certificates_as_cert_manager_writes_them(tmp_path: Path) -> None:
    path = issued(an_authority(tmp_path), tmp_path / "worker", "worker")
    for ours, theirs in (("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")):
        (path / ours).rename(path / theirs)
    assert IdentityFolder(path).credentials().identity == Identity("mesh", "worker")
