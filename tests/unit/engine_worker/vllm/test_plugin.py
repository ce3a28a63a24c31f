"""The plugin in processes of its own; no vLLM is needed for it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from engine_worker.engines.vllm.environment import NICENESS_VARIABLE, WORKER_PID_VARIABLE, installed_device

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")

CHILD = textwrap.dedent("""
    import signal, sys
    from engine_worker.engines.vllm.plugin import register
    register()
    print("registered", flush=True)
    signal.pause()
""")

PARENT = textwrap.dedent("""
    import os, signal, subprocess, sys
    os.environ[sys.argv[1]] = str(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    signal.pause()
""")


@pytest.mark.process
def test_a_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, WORKER_PID_VARIABLE, CHILD], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert _is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline_s = time.monotonic() + 5.0
    while _is_running(child) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not _is_running(child)


@pytest.mark.process
@pytest.mark.parametrize("worker_pid", [None, "own"])
def test_the_worker_itself_and_strangers_are_left_alone(worker_pid: str | None) -> None:
    check = textwrap.dedent("""
        import ctypes, os, sys
        from engine_worker.engines.vllm.plugin import register
        if sys.argv[2] == "own":
            os.environ[sys.argv[1]] = str(os.getpid())
        register()
        signal_number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(signal_number), 0, 0, 0)
        print(signal_number.value)
    """)
    environ = {name: value for name, value in os.environ.items() if name != WORKER_PID_VARIABLE}
    arguments = [sys.executable, "-c", check, WORKER_PID_VARIABLE, str(worker_pid)]
    assert subprocess.run(arguments, env=environ, capture_output=True, check=True, text=True).stdout == "0\n"


@pytest.mark.process
def test_a_child_of_the_worker_asks_for_the_signal_and_leaves_with_status_zero() -> None:
    check = textwrap.dedent("""
        import ctypes
        from engine_worker.engines.vllm.plugin import register
        register()
        signal_number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(signal_number), 0, 0, 0)
        print(signal_number.value)
    """)
    environ = {**os.environ, WORKER_PID_VARIABLE: str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", check], env=environ, capture_output=True, check=True, text=True)
    assert done.stdout == f"{int(signal.SIGKILL)}\n", "printed although the interpreter was left early"


@pytest.mark.process
@pytest.mark.skipif(installed_device() != "cpu", reason="only engines on a CPU give way")
def test_an_engine_on_a_cpu_gives_way() -> None:
    check = "import os; from engine_worker.engines.vllm.plugin import register; register(); print(os.nice(0))"
    environ = {**os.environ, WORKER_PID_VARIABLE: str(os.getpid()), NICENESS_VARIABLE: "3"}
    done = subprocess.run([sys.executable, "-c", check], env=environ, capture_output=True, check=True, text=True)
    assert int(done.stdout) == min(19, os.nice(0) + 3)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
