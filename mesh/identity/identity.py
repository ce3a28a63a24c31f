"""Who a process of the mesh is: the name in its certificate, as SPIFFE writes names.

`spiffe://TRUST_DOMAIN/ROLE` or `spiffe://TRUST_DOMAIN/ROLE/NAME`, in the certificate's subject alternative name. The
same certificate has the DNS names `ROLE.penstock` and `member.penstock`: by these a client that calls a worker makes
sure that a worker answers, wherever its address leads (TLS libraries compare DNS names by themselves, and no URIs).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from mesh.errors import ConfigurationError

ROLES: Final = (
    "frontend",
    "gateway",
    "scheduler",
    "monitor",
    "predictor",
    "cascade",
    "planner",
    "worker",
    "store",
    "envoy",
    "operator",
)
"""The roles of processes, the state store that `penstock up` serves, an Envoy in front of a gateway, and people who
run commands."""

DEFAULT_TRUST_DOMAIN: Final = "penstock"
ANY_ROLE: Final = "member"
"""In the place of a role, where a client takes whatever member of the mesh answers."""

_DNS_SUFFIX: Final = ".penstock"
_SCHEME: Final = "spiffe://"
_TRUST_DOMAIN: Final = re.compile(r"[a-z0-9._-]{1,255}")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")


@dataclass(frozen=True, slots=True)
class Identity:
    """The name in a certificate. Raises ConfigurationError where it is none."""

    trust_domain: str
    """The mesh, or all meshes of an organisation."""
    role: str
    name: str = ""
    """The member id of the one process that may use it; empty: any member of the role."""

    def __post_init__(self) -> None:
        if not _TRUST_DOMAIN.fullmatch(self.trust_domain):
            raise ConfigurationError(
                f"{self.trust_domain!r} is no trust domain: small letters, digits, dots, dashes and underscores"
            )
        if self.role not in ROLES:
            raise ConfigurationError(f"{self.role!r} is no role; there are {', '.join(ROLES)}")
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"{self.name!r} is no name of a member: letters, digits, dots, dashes and underscores, 253 at most"
            )

    @property
    def uri(self) -> str:
        """As it stands in the certificate."""
        path = f"{self.role}/{self.name}" if self.name else self.role
        return f"{_SCHEME}{self.trust_domain}/{path}"

    @property
    def dns_names(self) -> tuple[str, str]:
        """By which clients know it."""
        return (expected_dns_name(self.role), expected_dns_name(ANY_ROLE))

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Of a URI. Raises ConfigurationError."""
        trust_domain, _, path = uri.removeprefix(_SCHEME).partition("/")
        role, _, name = path.partition("/")
        if not uri.startswith(_SCHEME) or path.endswith("/"):
            raise ConfigurationError(f"{uri!r} is no identity; they read {_SCHEME}TRUST_DOMAIN/ROLE[/NAME]")
        return cls(trust_domain, role, name)

    def __str__(self) -> str:
        return self.uri


def expected_dns_name(role: str) -> str:
    """What a client finds in the certificate of a server of this role, `ANY_ROLE` for any."""
    return (role or ANY_ROLE) + _DNS_SUFFIX


def the_identity(names: Iterable[str]) -> Identity | None:
    """The one among a certificate's alternative names; None if there is none or more than one, which SPIFFE forbids."""
    uris = [name for name in names if name.startswith(_SCHEME)]
    if len(uris) != 1:
        return None
    try:
        return Identity.parse(uris[0])
    except ConfigurationError:
        return None
