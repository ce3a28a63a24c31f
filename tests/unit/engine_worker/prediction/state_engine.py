"""An engine whose hidden states a test makes up."""

from collections.abc import AsyncIterator

import numpy as np

from engine_worker.engines.hidden_state_source import HiddenStates
from mesh.mailbox import Mailbox
from tests.unit.engine_worker.worker.fake_engine import FakeEngine


class StateEngine(FakeEngine):
    """Tells the states that the test gives it."""

    def __init__(self, reason: str = "", width: int = 2) -> None:
        super().__init__()
        self.width = width
        self.reason = reason
        self.every_steps = 0
        self.captured: Mailbox[HiddenStates] = Mailbox()

    async def capture_hidden_states(self, every_steps: int) -> str:
        self.every_steps = every_steps
        return self.reason

    def hidden_states(self) -> AsyncIterator[HiddenStates]:
        return self.captured.read()

    def tell(self, **context_tokens: int) -> None:
        """The state of each request is its number of tokens, and zeros."""
        rows = np.zeros((len(context_tokens), self.width), "<f4")
        rows[:, 0] = list(context_tokens.values())
        ids, contexts = tuple(context_tokens), tuple(context_tokens.values())
        self.captured.put(HiddenStates(1, ids, contexts, self.width, rows.tobytes()))
