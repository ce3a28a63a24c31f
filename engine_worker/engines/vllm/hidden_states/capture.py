"""The hook itself: which rows of a step belong to which requests. Needs the shape of vLLM's model runner only."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

_NEEDED = ("input_batch", "optimistic_seq_lens_cpu", "discard_request_mask")
"""What vLLM's model runner (V1) is asked for the order and the lengths of its rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one step that were asked for; `states` is a tensor of its own, one row per id."""

    step: int
    internal_ids: Sequence[str]
    context_tokens: Sequence[int]
    states: Any
    ready: Any = None
    """On a GPU: the event after which `states` may be read from another stream."""


class HiddenStateCapture:
    """Called with each step's hidden states; passes every `every_steps`-th step's on.

    A step whose rows cannot be told apart is left out and counted, never guessed.
    """

    def __init__(self, runner: Any, every_steps: int, pass_on: Callable[[Rows], None]) -> None:
        self._runner = runner
        self.every_steps = every_steps
        self._pass_on = pass_on
        self._step = 0
        self.odd_steps_total = 0

    def __call__(self, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A forward pre-hook of `LogitsProcessor`: its arguments are the vocabulary layer and the hidden states. vLLM
        calls it once a step, and again only for logprobs of prompts, which the mesh never asks for."""
        if not self.every_steps:
            return
        self._step += 1
        if self._step % self.every_steps == 0:
            self._capture(arguments[1] if len(arguments) > 1 else named["hidden_states"])

    def _capture(self, hidden_states: Any) -> None:
        runner = self._runner
        ids = runner.input_batch.req_ids
        rows = len(ids)
        if hidden_states.shape[0] != rows:
            self._leave_out(hidden_states.shape[0], rows)
            return
        context_tokens = runner.optimistic_seq_lens_cpu[:rows].tolist()
        # A row in the middle of its prompt has a state too, but no token is sampled from it.
        unfinished = runner.discard_request_mask.np[:rows].tolist()
        kept = [row for row in range(rows) if not unfinished[row]]
        if kept:
            # Rows of a gathered tensor: vLLM makes a fresh one each step and never writes to it again.
            states = hidden_states if len(kept) == rows else hidden_states[kept]
            ids = [ids[row] for row in kept]
            context_tokens = [context_tokens[row] for row in kept]
            self._pass_on(Rows(self._step, ids, context_tokens, states, _ready(states)))

    def _leave_out(self, states: int, requests: int) -> None:
        self.odd_steps_total += 1
        if self.odd_steps_total == 1:
            log.error(
                "hidden states cannot be told apart and are left out", extra={"states": states, "requests": requests}
            )


def _ready(states: Any) -> Any:
    if not states.is_cuda:
        return None
    import torch

    event = torch.cuda.Event()
    event.record()
    return event


def capture_obstacle(runner: Any) -> str:
    """Why rows cannot be mapped to requests on this model runner; empty if they can."""
    missing = [name for name in _NEEDED if not hasattr(runner, name)]
    if missing:
        return (
            f"vLLM's model runner {type(runner).__module__}.{type(runner).__name__} has no {', '.join(missing)}: "
            "start the worker with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if getattr(runner, "num_spec_tokens", 0):
        return "speculative decoding samples several tokens a step from one request"
    return ""
