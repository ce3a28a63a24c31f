"""The sockets of frames. On one host unix sockets without a file (abstract ones): nothing to clean up, reachable from
the same network namespace only. Between hosts TCP."""

import ipaddress
import os
import socket
from pathlib import Path
from typing import Final

from mesh.errors import PeerUnavailable

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE: Final = "/proc/self/ns/net"
BACKLOG: Final = 512


def host_id() -> str:
    """Tells the machine and the network namespace of this process from all others; empty where the system does not say,
    and there are no such sockets."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{os.stat(_NETWORK_NAMESPACE).st_ino}"
    except OSError:
        return ""


def listening_socket(name: str) -> socket.socket:
    """One that listens under a name; `close` it. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connected_socket(name: str) -> socket.socket:
    """A connection to whoever listens under a name: at once, as the kernel makes it. Raises PeerUnavailable."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect("\0" + name)
    except OSError as error:
        connection.close()
        raise PeerUnavailable(f"the socket {name} takes no connection ({error.strerror})") from error
    return connection


def listening_tcp_socket(host: str, port: int) -> socket.socket:
    """One that listens at an address of this machine, port 0 taking a free one; `close` it. Raises OSError."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    is_any = bare == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server((bare, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_any)
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
