"""vLLM loads this in each of its processes (entry point `vllm.general_plugins`)."""

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys

from engine_worker.engines.vllm.environment import WORKER_PID_VARIABLE

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Tie a process of the engine's to the worker: it dies when its parent does, and leaves quickly when told to.

    Does nothing in the worker itself, and in a vLLM that the mesh did not start.
    """
    worker_pid = os.environ.get(WORKER_PID_VARIABLE)
    if worker_pid is None or worker_pid == str(os.getpid()):
        return
    # Registered first, this runs last.
    atexit.register(_leave)
    if sys.platform == "linux":
        _die_with_parent()


def _die_with_parent() -> None:
    """A worker killed with SIGKILL cannot shut its engine core down, which would hold memory and GPU on. So let
    the kernel do it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        # It died before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    """Taking the interpreter apart, torch and all, costs two seconds of CPU and frees nothing that the kernel
    does not."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
