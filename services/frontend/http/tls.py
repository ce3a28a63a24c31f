"""The endpoint's certificate, which may be renewed while it serves."""

import logging
import ssl
from pathlib import Path

from mesh.errors import ConfigurationError

log = logging.getLogger(__name__)


class TlsFiles:
    """A certificate with its chain and its key, both in PEM. New connections get what the files hold since the last
    `look`; those that are open go on with what they have."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigurationError for files that are missing, or do not fit each other."""
        self._certificate, self._key = certificate, key
        self._seen = self._stamps()
        try:
            self.context = self._loaded()
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"--tls-certificate {certificate} --tls-key {key}: {error}; give a PEM certificate with its chain, and "
                "its key without a passphrase"
            ) from error

    def look(self) -> bool:
        """Take in files that have changed; whether they had, and are good. Bad ones are logged, and the former
        certificate stays: they may be half written."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._loaded()  # first beside the one in use, of which a bad file would leave half
            _load(self.context, self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            extra = {"certificate": str(self._certificate), "error": str(error)}
            log.error("the new TLS certificate cannot be used; the former one stays", extra=extra)
            return False
        log.info("a new TLS certificate is in use", extra={"certificate": str(self._certificate)})
        return True

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load(context, self._certificate, self._key)
        return context

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._certificate, self._key))


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Without asking the terminal for a passphrase. Raises OSError and SSLError."""
    context.load_cert_chain(certificate, key, password=lambda: "")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes with the content, also where a link is turned to another file, as Kubernetes does with secrets."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
