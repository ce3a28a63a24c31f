"""The hidden states of an engine's model, from which remaining lengths are predicted (STAR, section 4.2)."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from engine_worker.engines.interface import Engine


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The last layer's hidden state of the last token, for all requests that sampled a token in one engine step."""

    step: int
    """Of the engine, counted since the capture began."""
    request_ids: tuple[str, ...]
    context_tokens: tuple[int, ...]
    """Per request, the tokens that its state has seen (prompt and generated); the token sampled from it is the next."""
    hidden_size: int
    states: bytes
    """float32, little-endian, request by request: requests x hidden_size x 4 bytes."""


@runtime_checkable
class HiddenStateSource(Protocol):
    """An engine whose hidden states can be had (STAR, section 4.2: final layer, last token)."""

    async def capture_hidden_states(self, every_steps: int) -> str:
        """Capture the states of every `every_steps`-th step from now on; 0 stops it. Returns why that cannot be done,
        empty if it can."""

    def hidden_states(self) -> AsyncIterator[HiddenStates]:
        """Yields what was captured, in order. One consumer only; one that lags loses some."""


def has_hidden_states(engine: Engine) -> TypeGuard[HiddenStateSource]:
    """Whether the engine is of a kind that has hidden states; `capture_hidden_states` says whether they can be had
    now."""
    return isinstance(engine, HiddenStateSource)
