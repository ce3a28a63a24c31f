"""Network devices of this machine, as far as UCX keeps to them."""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_UP_AND_RUNNING = 0x41
_IFREQ = struct.Struct("16s24x")
_FLAGS, _ADDRESS = slice(16, 18), slice(20, 24)


@dataclass(frozen=True, slots=True)
class Device:
    """A network device with an IPv4 address."""

    index: int
    """Of its life: a device that is made anew under its name has another one."""
    address: str
    is_up: bool
    """Set up, and with a cable."""


def ipv4_devices(used: str | None = None) -> Mapping[str, Device]:
    """By name; the loopback, which is never made anew, and devices that UCX_NET_DEVICES leaves out are not among them,
    nor are those that `used`, a list of the same form, leaves out.

    Devices without an address, such as the ends of containers' cables on their host, come and go, and matter to nobody.
    """
    chosen = (used or os.environ.get("UCX_NET_DEVICES", "all")).split(",")
    found: dict[str, Device] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for index, name in socket.if_nameindex():
            if name == "lo" or ("all" not in chosen and name not in chosen):
                continue
            asked = _IFREQ.pack(name.encode())
            try:
                address = fcntl.ioctl(probe, _SIOCGIFADDR, asked)[_ADDRESS]
                (flags,) = struct.unpack("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, asked)[_FLAGS])
            except OSError:
                continue  # it has no address, or is gone
            is_up = flags & _UP_AND_RUNNING == _UP_AND_RUNNING
            found[name] = Device(index, socket.inet_ntoa(address), is_up)
    return found


def device_addresses() -> Mapping[str, tuple[str, ...]]:
    """The IPv4 address and the global IPv6 addresses of each network device, the loopback included."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode()))[_ADDRESS]
            except OSError:
                continue  # it has no IPv4 address, or is gone
            found.setdefault(name, []).append(socket.inet_ntoa(packed))
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []  # a kernel without IPv6
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return {name: tuple(addresses) for name, addresses in found.items()}


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Ports of the machine's RDMA cards as UCX names them, such as mlx5_0:1."""
    try:
        return tuple(sorted(f"{port.parents[1].name}:{port.name}" for port in root.glob("*/ports/*")))
    except OSError:
        return ()


def changes(before: Mapping[str, Device], now: Mapping[str, Device]) -> str:
    """What keeps someone who began with the devices of `before` from new peers, in words; empty where nothing does.

    Only devices that were up count as begun with. That one of them is down or gone is no change: nothing is won by
    beginning anew without it, and whoever did in the moment in which it was being made anew would begin too early. A
    new one, or one that was made anew, counts once it is up.
    """
    known = {name: device for name, device in before.items() if device.is_up}
    said: list[str] = []
    for name, device in now.items():
        former = known.get(name)
        if former is None:
            said += [f"the network device {name} is new"] if device.is_up else []
        elif former.index != device.index:
            said += [f"the network device {name} was made anew"] if device.is_up else []
        elif former.address != device.address:
            said.append(f"the network device {name} had the address {former.address} and has {device.address}")
    return ", ".join(sorted(said))


def lost(before: Mapping[str, Device], now: Mapping[str, Device]) -> str:
    """Devices of `before` that are gone for good, whether or not another has their name now; empty where none is."""
    said: list[str] = []
    for name, former in before.items():
        device = now.get(name)
        if former.is_up and (device is None or device.index != former.index):
            said.append(f"the network device {name} {'is gone' if device is None else 'was made anew'}")
    return ", ".join(sorted(said))
