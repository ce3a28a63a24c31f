"""Mutual TLS of sockets beside gRPC's: the certificates, names and authorities that `mesh.identity.tls` has, the latest
at each new connection."""

import os
import ssl
from typing import Any, Final

from mesh.identity.files import Credentials, IdentityFolder

_NAME_KINDS: Final = frozenset({"URI", "DNS", "IP Address"})


class TlsContexts:
    """Both ends verify: a client by `server_hostname=expected_dns_name(role)`, a server by `names_in` and the doors."""

    def __init__(self, folder: IdentityFolder) -> None:
        self._folder = folder
        self._made: dict[int, tuple[Credentials, ssl.SSLContext]] = {}
        """By protocol: the latest, and what it was made of."""

    def server(self) -> ssl.SSLContext:
        """One that asks every caller for a certificate."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """One that compares the server's DNS names."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        credentials = self._folder.credentials()
        known = self._made.get(protocol)
        if known is None or known[0] is not credentials:
            known = self._made[protocol] = (credentials, _made_of(credentials, protocol))
        return known[1]


def names_in(connection: ssl.SSLObject) -> tuple[bytes, ...]:
    """The alternative names in the certificate of the other end, which was verified, as gRPC gives them."""
    certificate: Any = connection.getpeercert() or {}
    return tuple(str(name).encode() for kind, name in certificate.get("subjectAltName", ()) if kind in _NAME_KINDS)


def _made_of(credentials: Credentials, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # As gRPC: whatever stands in ca.pem is believed, be it an intermediate authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=credentials.authority.decode("ascii", errors="ignore"))
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # No session is taken up again: who comes back shows its certificate to the authorities of then.
        context.num_tickets = 0
    _load(context, credentials)
    return context


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Python reads certificates from files only, and those in the folder may be others by now."""
    file = os.memfd_create("identity")
    try:
        os.write(file, credentials.key + b"\n" + credentials.certificate)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
