"""The class that vLLM mixes into its worker (`worker_extension_cls`)."""

from collections.abc import Callable
from typing import Any, Self
from weakref import WeakSet

from engine_worker.engines.vllm.hidden_states.capture import HiddenStateCapture, capture_obstacle
from engine_worker.engines.vllm.hidden_states.sender import HiddenStateSender, push_to

_LOSSLESS_PATIENCE_S = 30.0
"""How long a step of a lossless capture waits for the worker's process, which may be writing a gigabyte of samples."""

_workers: "WeakSet[HiddenStateExtension]" = WeakSet()


def sees_logits() -> bool:
    """Whether this is the one of the model's workers that has whole states: the first of the last pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_pp_group().is_last_rank) and get_tp_group().rank_in_group == 0


def extended_workers() -> "tuple[HiddenStateExtension, ...]":
    """vLLM's workers in this process that have the extension."""
    return tuple(_workers)


class HiddenStateExtension:
    """Its methods become methods of vLLM's worker, called by `collective_rpc` between two steps; in a server that runs
    by itself, where nobody can call that, by the connector beside it."""

    penstock_hidden_states: HiddenStateCapture | None = None
    penstock_sender: HiddenStateSender | None = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """vLLM makes its worker, and mentions it to nobody. Names with two underscores are those that an extension may
        share with it."""
        worker = super().__new__(cls)
        _workers.add(worker)
        return worker

    def penstock_make_receive_buffers(self) -> None:
        """Make what the ranks behind the first of a pipeline receive into.

        vLLM does so in its warm-up, which its worker for CPUs (0.32) leaves out where nothing is compiled: the first
        request then ends the engine.
        """
        runner: Any = getattr(self, "model_runner")  # noqa: B009  vLLM's worker has it, this class alone does not
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def penstock_capture(self, endpoint: str, every_steps: int, lossless: bool) -> str:
        """Send every `every_steps`-th step's hidden states to `endpoint`, 0: none. Returns why not, empty if so.
        `lossless`: steps wait for whoever receives them, rather than that any is dropped."""
        if not sees_logits():
            return ""
        reason = self.penstock_obstacle()
        if not reason:
            self.penstock_install(lambda: push_to(endpoint), every_steps)
            if self.penstock_sender is not None:
                self.penstock_sender.patience_s = _LOSSLESS_PATIENCE_S if lossless else 0.0
        return reason

    def penstock_obstacle(self) -> str:
        """Why its hidden states cannot be captured; empty if they can."""
        if self.penstock_hidden_states is not None:
            return ""
        if obstacle := capture_obstacle(self._penstock_runner):
            return obstacle
        layers = len(self._penstock_layers)
        return "" if layers == 1 else f"the model has {layers} layers of the type LogitsProcessor, and one is needed"

    def penstock_install(self, open_send: Callable[[], Callable[[bytes], None]], every_steps: int) -> None:
        """Capture where nothing is in the way, on the thread that runs the steps. `open_send` is called once, on
        another thread (see `push_to`), and what it returns for each message."""
        if self.penstock_hidden_states is None:
            if not every_steps:
                return
            self.penstock_sender = HiddenStateSender(open_send)
            self.penstock_hidden_states = HiddenStateCapture(
                self._penstock_runner, every_steps, self.penstock_sender.put
            )
            self._penstock_layers[0].register_forward_pre_hook(self.penstock_hidden_states, with_kwargs=True)
        self.penstock_hidden_states.every_steps = every_steps

    @property
    def _penstock_runner(self) -> Any:
        return getattr(self, "model_runner")  # noqa: B009  vLLM's worker has it, this class alone does not

    @property
    def _penstock_layers(self) -> list[Any]:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        return [layer for layer in self._penstock_runner.get_model().modules() if isinstance(layer, LogitsProcessor)]
