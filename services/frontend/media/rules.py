"""What may be fetched for a client, and from where.

A URL that a client names is fetched by the mesh, with the mesh's reach: into its own network, to the metadata services
of clouds, to other tenants' ports. So only public addresses are asked, unless the operator has named the host.
"""

import binascii
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Final

from services.frontend.errors import ApiError, bad_request

_NAT64: Final = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What the operator allows."""

    max_bytes: int
    """Of the images, recordings and films of one request together."""
    allowed_domains: Sequence[str] = ()
    """Hosts that may be asked, whatever their addresses are; empty: all that have public ones."""
    local_path: str = ""
    """A directory of this machine whose files may be named; empty: none may."""

    def names(self, host: str) -> bool:
        """Whether the operator has named this host."""
        return host.lower() in {domain.lower() for domain in self.allowed_domains}

    def check_host(self, host: str, param: str) -> None:
        """Raises ApiError (400) for one that may not be asked."""
        if self.allowed_domains and not self.names(host):
            message = (
                f"The URL must be from one of the allowed domains: {', '.join(self.allowed_domains)}; not `{host}`."
            )
            raise bad_request(message, param)

    def check_addresses(self, host: str, addresses: Sequence[str], param: str) -> None:
        """Raises ApiError (400) where a host has an address that may not be asked: all of them count, because whoever
        answers for the name chooses which one is taken."""
        if not self.names(host) and not all(map(is_public, addresses)):
            message = f"`{host}` is not on the public network; its operator can allow it by --allowed-media-domains."
            raise bad_request(message, param)


def is_public(address: str) -> bool:
    """Whether an IP address is anybody's: not private, local, shared, reserved, multicast, nor one of these in another
    form (IPv4 within IPv6)."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if inner is None and parsed in _NAT64:
            inner = ip_address(int(parsed) & 0xFFFFFFFF)  # type: ignore[assignment]
        if inner is not None:
            return is_public(str(inner))
    return parsed.is_global and not parsed.is_multicast


def data_of(url: str, max_bytes: int, param: str) -> bytes:
    """What a data URL holds. Raises ApiError (400)."""
    head, comma, data = url[len("data:") :].partition(",")
    if not comma or head.rpartition(";")[2] != "base64":
        raise bad_request("A data URL must have the form `data:image/png;base64,...`.", param, "invalid_value")
    if len(data) // 4 * 3 - 2 > max_bytes:
        raise too_large(max_bytes, param)
    try:
        content = b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"The data URL is not valid base64: {error}.", param, "invalid_value") from error
    if not content:
        raise bad_request("The data URL is empty.", param, "invalid_value")
    return content


def too_large(max_bytes: int, param: str) -> ApiError:
    """400: more than one request may bring."""
    message = f"The images, recordings and films of a request may have {max_bytes} bytes together (--max-media-bytes)."
    return bad_request(message, param, "media_too_large")
