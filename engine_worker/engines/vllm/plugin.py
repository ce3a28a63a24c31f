"""vLLM loads this in each of its processes (entry point `vllm.general_plugins`)."""

import atexit
import ctypes
import multiprocessing
import os
import platform
import signal
import sys

from engine_worker.engines.vllm.environment import NICENESS_VARIABLE, WORKER_PID_VARIABLE, installed_device

_PR_SET_PDEATHSIG = 1
_SYS_ARCH_PRCTL = 158  # x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


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
        if platform.machine() == "x86_64":
            _ask_for_amx()
    if installed_device() == "cpu":
        os.nice(int(os.environ.get(NICENESS_VARIABLE, "0")))
        # Imported here: this module is loaded in the worker too, which needs no torch.
        from engine_worker.engines.vllm.cpu_generator import use_cpu_generators

        use_cpu_generators()


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


def _ask_for_amx() -> None:
    """Ask the kernel for the tile registers of Intel's AMX, without which their first use is an illegal instruction.

    vLLM's attention kernel for bfloat16 on a CPU uses them where the CPU has them, and leaves the asking to whoever ran
    before it: oneDNN does it for large matrices, for those of a small model nobody does. Refused where there are none.
    """
    ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)


def _leave() -> None:
    """Taking the interpreter apart, torch and all, costs two seconds of CPU and frees nothing that the kernel
    does not."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
