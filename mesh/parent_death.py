"""A child process that ends when its parent does, however the parent ended (Linux)."""

import ctypes
import os
import signal
import sys

from mesh.errors import ConfigurationError

PARENT_VARIABLE = "PENSTOCK_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, death_signal: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `death_signal` to this process when its parent dies.

    `parent_pid` is who the parent is meant to be: if it is gone already, this process ends at once. Raises
    ConfigurationError where the kernel does not offer it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise ConfigurationError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        sys.exit(f"the parent process {parent_pid} is gone")


def end_with_parent_if_asked() -> None:
    """Do so if the environment names a parent, as the local supervisor's does."""
    if parent := os.environ.get(PARENT_VARIABLE):
        end_with_parent(int(parent))
