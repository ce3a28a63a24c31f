"""A mesh's own certificate authority: a folder whose key signs what `penstock ca issue` makes.

For one machine and for those who have no other; cert-manager, SPIRE or a company's own authority do as well, if they
write the names that `mesh.identity.identity` describes.
"""

import ipaddress
import os
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.errors import ConfigurationError
from mesh.identity.files import IdentityFolder
from mesh.identity.identity import ROLES, Identity

AUTHORITY_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 90
_SKEW: Final = timedelta(minutes=5)
"""By which the clocks of two machines may differ: certificates are valid from so long ago."""


class Authority:
    """Signs certificates of one trust domain."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.folder = folder
        self._certificate = certificate
        self._key = key

    @property
    def trust_domain(self) -> str:
        """In whose name it signs."""
        (attribute,) = self._certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(attribute.value)

    @classmethod
    def create(cls, folder: Path, trust_domain: str, now: datetime) -> "Authority":
        """A new one in a folder of this user's alone. Raises ConfigurationError if there is one already."""
        if (folder / "ca-key.pem").exists():
            raise ConfigurationError(f"{folder} has an authority already; every certificate of it would become invalid")
        Identity(trust_domain, "operator")  # raises for a name that no certificate can have
        key, name = ec.generate_private_key(ec.SECP256R1()), _name(trust_domain)
        certificate = (
            _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / "ca-key.pem", _pem(key))
        _write(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
        return cls(folder, certificate, key)

    @classmethod
    def open(cls, folder: Path) -> "Authority":
        """The one in this folder. Raises ConfigurationError."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
        except FileNotFoundError as error:
            raise ConfigurationError(f"there is no {error.filename}; `penstock ca init` makes an authority") from None
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{folder} holds no authority that can be read: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigurationError(f"ca.pem and ca-key.pem in {folder} do not fit together")
        return cls(folder, certificate, key)

    def issue(
        self,
        identity: Identity,
        folder: Path,
        now: datetime,
        days: float = CERTIFICATE_DAYS,
        hosts: tuple[str, ...] = (),
    ) -> None:
        """Write `ca.pem`, `cert.pem` and `key.pem` of somebody, over those of before. `hosts`: names and addresses that
        stand in the certificate besides, for programs that compare them, such as etcd. Raises ConfigurationError."""
        if identity.trust_domain != self.trust_domain:
            raise ConfigurationError(f"{identity}: this authority signs for spiffe://{self.trust_domain}/ only")
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
        names += [x509.DNSName(name) for name in identity.dns_names]
        names += [_host(host) for host in hosts]
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        # The common name is for etcd, to which it is the user.
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.role)])
        certificate = (
            _builder(subject, self._certificate.subject, key.public_key(), now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(both, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / "ca.pem", (self.folder / "ca.pem").read_bytes(), mode=0o644)
        _write(folder / "key.pem", _pem(key))
        _write(folder / "cert.pem", certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)

    def has_issued(
        self, identity: Identity, folder: Path, now: datetime, at_least: timedelta, hosts: tuple[str, ...] = ()
    ) -> bool:
        """Whether the folder has this identity by this authority, naming these hosts and valid for `at_least` more."""
        try:
            held = IdentityFolder(folder).credentials()
        except ConfigurationError:
            return False
        if held.identity != identity or held.authority != (self.folder / "ca.pem").read_bytes():
            return False
        certificate = x509.load_pem_x509_certificate(held.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return held.expires - now >= at_least and all(_host(host) in names for host in hosts)


def make_identities(folder: Path, trust_domain: str, now: datetime) -> Path:
    """An authority of its own for a mesh on one machine, and a folder with an identity of each role, which is returned.
    All of former ones is deleted: whoever has kept one of them is nobody from then on."""
    # Deleted at each start rather than kept: nothing outlives a mesh by which somebody could join the next one.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    authority = Authority.create(folder / "authority", trust_domain, now)
    for role in ROLES:
        authority.issue(Identity(trust_domain, role), folder / role, now, days=AUTHORITY_DAYS)
    return folder


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: float
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SKEW).not_valid_after(now + timedelta(days=days))


def _name(trust_domain: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Penstock mesh"),
            x509.NameAttribute(NameOID.COMMON_NAME, trust_domain),
        ]
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Whole or not at all, and never readable by others in between."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    fresh.replace(path)
