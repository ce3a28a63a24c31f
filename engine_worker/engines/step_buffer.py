"""Gathers the deltas of one engine step into one message."""

import asyncio
from collections import deque
from dataclasses import replace

from controlplane.model.request import StepOutput, TokenDelta


class StepBuffer:
    """Deltas in, step messages out, on one event loop.

    vLLM wakes one coroutine per request and step. All of them are in the loop's ready queue before the first
    one runs, so a reader that the first delta wakes finds the whole step. A reader that lags gets several steps
    as one message, so that the buffer holds no more than one delta per request.
    """

    def __init__(self) -> None:
        self._messages: deque[dict[str, TokenDelta]] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, delta: TokenDelta) -> None:
        """Add what a step brought for one request, in the order of its offsets."""
        latest = self._messages[-1] if self._messages else {}
        earlier = latest.get(delta.request_id)
        # After an end, the same id means another request, which belongs into another message.
        if not self._messages or (earlier is not None and earlier.finish_reason is not None):
            latest, earlier = {}, None
            self._messages.append(latest)
        latest[delta.request_id] = delta if earlier is None else _join(earlier, delta)
        self._changed.set()

    def close(self) -> None:
        """No more deltas will come; `take` returns what is left, then ends."""
        self._closed = True
        self._changed.set()

    async def take(self) -> StepOutput | None:
        """Wait for the next message; None once the buffer is closed and empty."""
        while not self._messages:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return StepOutput(tuple(self._messages.popleft().values()))


def _join(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """Two consecutive deltas of one request as one, for a consumer that fell behind by a step."""
    return replace(
        second,
        offset=first.offset,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        cached_tokens=first.cached_tokens if second.cached_tokens is None else second.cached_tokens,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
    )
