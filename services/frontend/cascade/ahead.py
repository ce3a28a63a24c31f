"""A tier's answer that was begun before anybody knows whether it is needed."""

import asyncio

from controlplane.protocols.cascade.state_machine import Generate
from services.frontend.cascade.attempt import Attempt
from services.frontend.cascade.tier_answer import Read, TierAnswer, TierReader


class AnswerAhead:
    """Give `task` what asks the tier with `read`: what comes is kept until it is `claimed`, then goes on as asked."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.task: asyncio.Task[TierAnswer] | None = None
        self._claim: asyncio.Future[Read] = asyncio.get_running_loop().create_future()

    @property
    def is_claimed(self) -> bool:
        """Whether its client waits for it."""
        return self._claim.done() and not self._claim.cancelled()

    @property
    def has_failed(self) -> bool:
        """Before it was claimed: nobody has lost anything by it."""
        return self.task is not None and self.task.done() and self.task.exception() is not None

    async def read(self, reader: TierReader) -> None:
        """Keep what comes until it is known how to go on."""
        self.attempt.reader = reader
        await reader.begin()
        while not reader.done and not self._claim.done():
            await reader.hold()
        read_on = await self._claim
        await read_on(reader)

    async def claimed(self, read_on: Read, asking: Generate) -> TierAnswer:
        """The tier is needed after all. Raises ApiError, as any request to it would."""
        assert self.task is not None
        assert asking.tier == self.attempt.tier, "it was begun for this tier"
        self._claim.set_result(read_on)
        return await self.task

    async def abandon(self) -> None:
        """Return once it is aborted; its tokens stay known to `attempt`."""
        self.attempt.abandoned = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
