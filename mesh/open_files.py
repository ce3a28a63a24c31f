"""The process's limit of open files."""

import resource
from typing import Final

SPARE_FILES: Final = 64
"""For what is no connection: logs, the event loop, sockets to other processes of the mesh."""


def allow_open_files(connections: int) -> int:
    """Raise the process's limit of open files for so many connections; returns how many it really allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - SPARE_FILES))
