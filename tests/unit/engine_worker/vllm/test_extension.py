"""vLLM's worker is found in a process in which nobody can call `collective_rpc`."""

import gc

from engine_worker.engines.vllm.hidden_states.extension import HiddenStateExtension, extended_workers
from engine_worker.engines.vllm.hidden_states.message import EXTENSION_CLASS


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank


class GpuWorker(Worker):
    pass


def test_a_worker_that_the_extension_is_mixed_into_is_remembered() -> None:
    assert f"{HiddenStateExtension.__module__}.{HiddenStateExtension.__name__}" == EXTENSION_CLASS
    # As vLLM does it (`WorkerWrapperBase.init_worker`).
    assert not [name for name in dir(HiddenStateExtension) if not name.startswith(("__", "penstock_", "_penstock_"))]
    GpuWorker.__bases__ = (*GpuWorker.__bases__, HiddenStateExtension)
    worker = GpuWorker(rank=3)
    assert extended_workers() == (worker,)
    assert worker.rank == 3
    del worker
    gc.collect()
    assert extended_workers() == ()
