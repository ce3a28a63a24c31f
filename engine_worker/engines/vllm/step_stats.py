"""Taps vLLM's statistics. Imports vLLM: only for use once an engine is being started."""

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from engine_worker.engines.vllm.load import StepStats


def step_logger_class(on_step: Callable[[int, StepStats], None]) -> Callable[[Any, int], StatLoggerBase]:
    """A stat logger factory whose loggers hand each step's numbers to `on_step`, with the number of
    the engine core.

    vLLM records a step right after it has put the step's outputs into the requests' queues and before any of
    their readers runs. It says that what the statistics hold may change between versions.
    """

    class StepLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._core = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is None:
                return
            details = scheduler_stats.iteration_details
            on_step(
                self._core,
                StepStats(
                    running_requests=scheduler_stats.num_running_reqs,
                    kv_cache_usage=scheduler_stats.kv_cache_usage,
                    prefilled_tokens=0 if details is None else details.num_ctx_tokens,
                    decoded_tokens=0 if details is None else details.num_generation_tokens,
                    preemptions=0 if iteration_stats is None else iteration_stats.num_preempted_reqs,
                ),
            )

        def log_engine_initialized(self) -> None:
            pass

    return StepLogger
