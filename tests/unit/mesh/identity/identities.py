"""Authorities and transports of tests."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from mesh.identity.authority import Authority
from mesh.identity.files import IdentityFolder
from mesh.identity.identity import Identity
from mesh.identity.tls import TlsTransport

NOW = datetime.now(UTC)


def an_authority(folder: Path, trust_domain: str = "mesh") -> Authority:
    """A new one."""
    return Authority.create(folder / f"authority of {trust_domain}", trust_domain, NOW)


def issued(
    authority: Authority, folder: Path, role: str, name: str = "", ago: timedelta = timedelta(), days: float = 1
) -> Path:
    """The folder of an identity that is valid from `ago` for some days."""
    authority.issue(Identity(authority.trust_domain, role, name), folder, NOW - ago, days)
    return folder


def transport(authority: Authority, folder: Path, role: str, name: str = "") -> TlsTransport:
    """Of a process with this identity."""
    return TlsTransport(IdentityFolder(issued(authority, folder / f"{role}{name}", role, name)))
