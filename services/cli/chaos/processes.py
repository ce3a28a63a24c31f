"""Signals to the processes of a mesh on this machine, and what they weigh."""

import os
import signal
import socket
from pathlib import Path

from mesh.errors import PeerUnavailable
from mesh.membership import Member

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def send_signal(member: Member, number: signal.Signals) -> None:
    """To its process, as it announced it: a number that means another process on another machine, or in a container.

    Raises PeerUnavailable if the process is not on this machine, or no more.
    """
    host = member.address.rpartition(":")[0].strip("[]")
    if not _is_here(host):
        raise PeerUnavailable(
            f"{member.role} {member.member_id} is at {host}, not on this machine: run penstock chaos there"
        )
    pid = int(member.attributes["pid"])
    if not {"serve", member.role} <= _arguments(pid):
        raise PeerUnavailable(
            f"process {pid} of this machine is not {member.role} {member.member_id}, which is gone or in a container"
        )
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise PeerUnavailable(f"the process of {member.role} {member.member_id} is gone") from error


def resident_bytes(pid: int, *, descendants: bool = True) -> int:
    """Memory of a process and of its descendants (an engine's own); 0 where there is none."""
    total, left = 0, [pid]
    while left:
        process = Path("/proc") / str(left.pop())
        try:
            total += int((process / "statm").read_text().split()[1]) * PAGE_BYTES
            if descendants:
                left += [int(child) for child in (process / "task" / process.name / "children").read_text().split()]
        except (OSError, IndexError):
            continue  # it ended meanwhile
    return total


def _arguments(pid: int) -> set[str]:
    """Of a process's command; none where there is no such process."""
    try:
        return set((Path("/proc") / str(pid) / "cmdline").read_text(errors="replace").split("\0"))
    except OSError:
        return set()


def _is_here(host: str) -> bool:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
