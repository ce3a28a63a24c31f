"""State that the vLLM engine keeps of each request."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from controlplane.model.request import EngineRequest
from engine_worker.engines.vllm.connector.messages import PausedNotice


@dataclass(slots=True, eq=False)
class Pause:
    """A pause of one request, from the order to the last delivered token."""

    notice: "asyncio.Future[PausedNotice | None]"
    """What stands still; None if the request ended first."""
    is_taken_back: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """All that was generated before has been delivered."""


@dataclass(slots=True, eq=False)
class EngineRequestState:
    """What the engine keeps of a request until it has ended."""

    request: EngineRequest
    """As it was handed to vLLM, emitted tokens included."""
    offset: int
    """Tokens generated so far, here and elsewhere."""
    is_aborted: bool = False
    pause: Pause | None = None
    tells_cached: bool = True
    """Whether the next delta is its first."""
    serving: "asyncio.Task[Any] | None" = None
    staged: str = ""
    """The migration that brought its last blocks here; empty once vLLM has the request, and with it the blocks."""

    @property
    def request_id(self) -> str:
        """The mesh's id of the request; vLLM's own has a suffix."""
        return self.request.request_id

    @property
    def is_paused(self) -> bool:
        """Whether it is out of the batch and nobody has resumed it since."""
        return self.pause is not None and self.pause.notice.done() and not self.pause.is_taken_back

    def expects(self) -> int:
        """The offset at which everything generated before the pause has been delivered. Call only once the pause has
        come about."""
        assert self.pause is not None
        notice = self.pause.notice.result()
        return self.offset if notice is None else len(self.request.emitted_token_ids) + len(notice.generated_token_ids)
