"""Which addresses and devices an agent takes, from the host that it is told."""

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence

from mesh.errors import ConfigurationError

LOOPBACK = "lo"
BETWEEN_CORES = "/"
_WILDCARDS = frozenset({"0.0.0.0", "::"})


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a machine."""
    return host.strip("[]") in _WILDCARDS


def join(host: str, *ports: int) -> str:
    """host:port, with an IPv6 address in brackets; further ports after commas."""
    return f"[{host.strip('[]')}]:{_listed(ports)}" if ":" in host else f"{host}:{_listed(ports)}"


def split(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises `ValueError` for anything else."""
    host, ports = split_ports(address)
    if len(ports) > 1:
        raise ValueError(f"{address!r} is no host:port")
    return host, ports[0]


def split_ports(address: str) -> tuple[str, tuple[int, ...]]:
    """Host, without brackets, and the ports, at least one. Raises `ValueError` for anything else."""
    host, _, ports = address.rpartition(":")
    if not host or not all(port.isdigit() for port in ports.split(",")):
        raise ValueError(f"{address!r} is no host:port")
    return host.strip("[]"), tuple(int(port) for port in ports.split(","))


def join_cores(addresses: Sequence[str]) -> str:
    """One address for an instance of several engine cores (see `cores`), all on one host: ports behind a slash."""
    return BETWEEN_CORES.join((addresses[0], *(address.rpartition(":")[2] for address in addresses[1:])))


def split_cores(address: str) -> tuple[str, ...]:
    """The address of each engine core. Raises `ValueError` for what is none."""
    first, *others = address.split(BETWEEN_CORES)
    host, _ = split_ports(first)
    return (first, *(join(host, *split_ports(f"{host}:{ports}")[1]) for ports in others))


def reachable_address(kv_address: str, bind_host: str, worker_address: str) -> str:
    """Where peers reach agents that listen on `kv_address`.

    Those that listen where their worker does (`bind_host`), or on all addresses, are reached by the worker's own host.
    """
    cores = [split_ports(address) for address in split_cores(kv_address)]
    host = cores[0][0]
    if is_wildcard(host) or host == bind_host.strip("[]"):
        host = split(worker_address)[0]
    return join_cores([join(host, *ports) for _, ports in cores])


def numeric_host(host: str) -> str:
    """The address that a name stands for, an IPv4 one if there is any. May block. Raises `ConfigurationError`."""
    bare = host.strip("[]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(f"--kv-host {host}: no address has that name ({error})") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def ucx_network(
    host: str,
    port: int,
    addresses: Mapping[str, Iterable[str]],
    rdma_devices: Iterable[str],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """UCX's settings (without UCX_) that keep it to the device of `host`, a numeric address.

    What `environ` sets is left out. `addresses`: those of this machine by network device. Its RDMA devices are used
    beside any but the loopback.

    UCX's TCP transport listens besides, on the address of each device: `port` + 1, or a free port where `port` is 0.
    Raises `ConfigurationError` if no device has the address.
    """
    wanted = {"TCP_PORT_RANGE": f"{port + 1}-{port + 1}"} if port else {}
    if not is_wildcard(host):
        address = ipaddress.ip_address(host)
        wanted["TCP_AF_PRIO"] = "inet,inet6" if address.version == 4 else "inet6,inet"
        device = LOOPBACK if address.is_loopback else _device_of(host, addresses)
        wanted["NET_DEVICES"] = ",".join((device, *(() if device == LOOPBACK else rdma_devices)))
    return {name: value for name, value in wanted.items() if f"UCX_{name}" not in environ}


def loopback_obstacle(host: str, addresses: Mapping[str, Iterable[str]]) -> str:
    """Why peers that connect to `host`, a numeric address, will not get through; empty if they may.

    The kernel answers at all of 127.0.0.0/8, but UCX looks for the device that has the very address which a peer has
    connected to, finds none, and gives up: `length mismatch` at the peer.
    """
    if is_wildcard(host) or not ipaddress.ip_address(host).is_loopback or host in addresses.get(LOOPBACK, ()):
        return ""
    return f"UCX finds no device by {host}, which {LOOPBACK} does not have itself; use 127.0.0.1 (--kv-host)"


def _listed(ports: Iterable[int]) -> str:
    return ",".join(map(str, ports))


def _device_of(host: str, addresses: Mapping[str, Iterable[str]]) -> str:
    for device, theirs in addresses.items():
        if host in theirs:
            return device
    known = ", ".join(f"{', '.join(theirs)} ({device})" for device, theirs in addresses.items())
    raise ConfigurationError(
        f"--kv-host {host}: this machine has {known or 'no address'}; give one of them, or 0.0.0.0"
    )
