"""UCX's listener, moved to the address that it was told.

UCX's Python binding (0.52) takes a port but no address and listens on 0.0.0.0. Binding to a device (SO_BINDTODEVICE)
would keep out other machines, but also this machine's own workers, whose packets to its own address come over the
loopback. Exchanging worker addresses, without a listener, was tried too: two agents that connect to each other at the
same moment are then paired as one connection. So the socket itself is exchanged: UCX knows it by its descriptor, never
asks for its address again, and does not mind what is behind the number.
"""

import contextlib
import ctypes
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import ConfigurationError

_BACKLOG = 128
_EPOLL_CTL_ADD = 1
_REGISTERED = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)
"""A descriptor that an epoll set watches, as /proc tells it (proc(5))."""


class _EpollEvent(ctypes.Structure):
    # The kernel packs it on x86 only (`EPOLL_PACKED`).
    _pack_ = 1 if os.uname().machine in ("x86_64", "i686") else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


@dataclass(frozen=True, slots=True)
class _Watch:
    epoll: int
    events: int
    data: int


def listening_sockets() -> dict[int, tuple[str, int]]:
    """Address and port of each TCP socket on which this process listens, by its descriptor."""
    found: dict[int, tuple[str, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                continue
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, port = copy.getsockname()[:2]
                found[int(name)] = (host, port)
    return found


def move_listener(port: int, host: str, wanted_port: int) -> int:
    """Have whoever listens in this process on `port` listen on `host` and `wanted_port` (0: a free one) instead.

    Returns the port. `host` is a numeric address, 0.0.0.0 or :: (both families). Raises `ConfigurationError` where the
    port is taken, and where this system does not let the socket be exchanged.
    """
    descriptors = [number for number, (_, theirs) in listening_sockets().items() if theirs == port]
    if len(descriptors) != 1:
        raise ConfigurationError(f"UCX's listener on port {port} was not found among this process's sockets")
    descriptor = descriptors[0]
    watches = _watches(descriptor)
    if not watches:
        raise ConfigurationError("nobody watches UCX's listener: this version of UCX cannot be bound to an address")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        ours = socket.create_server(
            (host, wanted_port), family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::", reuse_port=False
        )
    except OSError as error:
        raise ConfigurationError(
            f"the KV transfer agent cannot listen on {host}, port {wanted_port} ({error}): is it taken, and is that an "
            "address of this machine? Give others by --kv-host and --kv-port"
        ) from error
    with ours:
        ours.setblocking(False)
        os.dup2(ours.fileno(), descriptor, inheritable=False)  # which ends the watches of the former socket
        _watch_again(descriptor, watches)
        return int(ours.getsockname()[1])


def _watches(descriptor: int) -> list[_Watch]:
    found = []
    for entry in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            for number, events, data in _REGISTERED.findall(entry.read_text()):
                if int(number) == descriptor:
                    found.append(_Watch(int(entry.name), int(events, 16), int(data, 16)))
    return found


def _watch_again(descriptor: int, watches: list[_Watch]) -> None:
    """Put a descriptor back into the epoll sets that it was in; several descriptors may be of one set."""
    library = ctypes.CDLL(None, use_errno=True)
    added = 0
    for watch in watches:
        event = _EpollEvent(watch.events, watch.data)
        added += library.epoll_ctl(watch.epoll, _EPOLL_CTL_ADD, descriptor, ctypes.byref(event)) == 0
    if not added:
        raise ConfigurationError(f"UCX's listener cannot be watched again: {os.strerror(ctypes.get_errno())}")
