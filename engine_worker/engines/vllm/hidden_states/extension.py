"""The class that vLLM mixes into its worker (`worker_extension_cls`)."""

from typing import Any

from engine_worker.engines.vllm.hidden_states.capture import HiddenStateCapture, capture_obstacle
from engine_worker.engines.vllm.hidden_states.sender import HiddenStateSender

EXTENSION_CLASS = f"{__name__}.HiddenStateExtension"


def _sees_logits() -> bool:
    """Whether this is the one of the model's workers that has whole states: the first of the last pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_pp_group().is_last_rank) and get_tp_group().rank_in_group == 0


class HiddenStateExtension:
    """Its methods become methods of vLLM's worker, called by `collective_rpc` between two steps."""

    penstock_hidden_states: HiddenStateCapture | None = None

    def penstock_capture(self, endpoint: str, every_steps: int) -> str:
        """Send every `every_steps`-th step's hidden states to `endpoint`, 0: none. Returns why not, empty if so."""
        runner: Any = getattr(self, "model_runner")  # noqa: B009  vLLM's worker has it, this class alone does not
        if self.penstock_hidden_states is not None:
            self.penstock_hidden_states.every_steps = every_steps
            return ""
        if not _sees_logits():
            return ""
        return capture_obstacle(runner) or self._penstock_install(runner, endpoint, every_steps)

    def _penstock_install(self, runner: Any, endpoint: str, every_steps: int) -> str:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        layers = [layer for layer in runner.get_model().modules() if isinstance(layer, LogitsProcessor)]
        if len(layers) != 1:
            return f"the model has {len(layers)} layers of the type LogitsProcessor, and one is needed"
        self.penstock_hidden_states = HiddenStateCapture(runner, every_steps, HiddenStateSender(endpoint).put)
        layers[0].register_forward_pre_hook(self.penstock_hidden_states, with_kwargs=True)
        return ""
