"""A process's certificate, its key and the authority that it believes, in a folder that may change while it runs.

The folder has `ca.pem`, `cert.pem` and `key.pem`, or `ca.crt`, `tls.crt` and `tls.key`, as cert-manager and Kubernetes
Secrets name them. Whoever renews them replaces the files; new connections then use the new ones.
"""

import logging
import os
import ssl
import stat
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from mesh.errors import ConfigurationError
from mesh.identity.identity import Identity, the_identity

log = logging.getLogger(__name__)

IDENTITY_VARIABLE: Final = "PENSTOCK_IDENTITY"
"""Names the folder, where no option does."""

_NAMES: Final = (("ca.pem", "cert.pem", "key.pem"), ("ca.crt", "tls.crt", "tls.key"))
_OTHERS: Final = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


@dataclass(frozen=True, slots=True)
class Credentials:
    """What was in the folder at one time."""

    authority: bytes
    certificate: bytes
    key: bytes
    identity: Identity
    expires: datetime


def own_folder(path: str, role: str) -> Path:
    """Where the identity of a process of this role is: in the folder itself, or in one of the role's name in it."""
    folder = Path(path)
    return folder / role if (folder / role).is_dir() else folder


class IdentityFolder:
    """Reads the folder again when its files have changed."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError if there is no identity in it."""
        self.path = path
        self._seen = self._stamp()
        self._credentials = self._read()

    def credentials(self) -> Credentials:
        """Those of now. Files that do not fit together, as while they are replaced, leave those of before in use."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return self._credentials
            credentials = self._read()
        except (ConfigurationError, OSError) as error:
            log.warning("a changed identity is not used", extra={"folder": str(self.path), "error": str(error)})
            return self._credentials
        if credentials.identity != self._credentials.identity:
            log.error(
                "a changed identity is not used: it is somebody else's",
                extra={"is": str(self._credentials.identity), "would_be": str(credentials.identity)},
            )
            return self._credentials
        self._seen, self._credentials = stamp, credentials
        log.info("identity renewed", extra={"identity": str(credentials.identity), "expires": str(credentials.expires)})
        return credentials

    def _paths(self) -> tuple[Path, Path, Path]:
        for names in _NAMES:
            authority, certificate, key = (self.path / name for name in names)
            if certificate.exists():
                return authority, certificate, key
        raise ConfigurationError(
            f"there is no identity in {self.path}: it needs ca.pem, cert.pem and key.pem (`penstock ca issue` makes "
            "them), or ca.crt, tls.crt and tls.key"
        )

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        try:
            states = [os.stat(path) for path in self._paths()]
        except FileNotFoundError as error:
            raise ConfigurationError(f"there is no {error.filename}, which an identity needs") from None
        return tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)

    def _read(self) -> Credentials:
        from cryptography import x509  # takes 50 ms, and most commands need no identity

        authority, certificate, key = self._paths()
        if os.stat(key).st_mode & _OTHERS:
            raise ConfigurationError(
                f"others may read or change {key}; chmod 600 it, and issue it anew if they may have"
            )
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            content = certificate.read_bytes()
            parsed = x509.load_pem_x509_certificate(content)
            names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ssl.SSLError, ValueError, x509.ExtensionNotFound) as error:
            raise ConfigurationError(f"{certificate} and {key} are no identity of a mesh: {error}") from error
        identity = the_identity(names.get_values_for_type(x509.UniformResourceIdentifier))
        if identity is None:
            raise ConfigurationError(
                f"{certificate} names no member of a mesh: its subject alternative name needs one URI "
                "spiffe://TRUST_DOMAIN/ROLE[/NAME]"
            )
        if missing := set(identity.dns_names) - set(names.get_values_for_type(x509.DNSName)):
            raise ConfigurationError(
                f"{certificate} lacks the DNS names {', '.join(sorted(missing))}: see docs/security.md"
            )
        return Credentials(authority.read_bytes(), content, key.read_bytes(), identity, parsed.not_valid_after_utc)
