"""The other workers that KV of this one makes sense to."""

import asyncio
import logging
from typing import Final

from controlplane.model.incarnation import Incarnation
from engine_worker.instance import Instance
from mesh.membership import Directory, Member

log = logging.getLogger(__name__)

SAME_ATTRIBUTES: Final = ("model", "engine", "block_tokens")
"""Attributes that two workers must share before KV of one makes sense to the other."""
WAIT_S: Final = 3.0
"""Whoever needs the others before they have been read waits at most this long."""


class Peers:
    """A worker follows the other workers only once it needs them (`FOLLOWED_AT_START`): for the first request that it
    is to move, the first prefix that it is to pull, or a plan of stages."""

    def __init__(self, instance: Instance, directory: Directory) -> None:
        self._instance, self._directory = instance, directory

    @property
    def are_known(self) -> bool:
        """Whether they have been read, and are followed."""
        return self._directory.knows("worker")

    def present(self) -> tuple[Member, ...]:
        """Those in the mesh now, as far as they are known."""
        own = self._instance.description
        facts = {"model": own.model, "engine": own.engine, "block_tokens": str(own.block_tokens)}
        return tuple(
            member
            for member in self._directory.members("worker")
            if member.member_id != own.instance_id
            and all(member.attributes.get(name) == facts[name] for name in SAME_ATTRIBUTES)
        )

    def incarnations(self) -> dict[str, Incarnation]:
        """Theirs, by member id."""
        return {each.member_id: Incarnation(each.member_id, each.incarnation_id) for each in self.present()}

    async def known(self) -> tuple[Member, ...]:
        """Follow them from now on; those in the mesh now. None where the store does not answer in time."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._directory.follow("worker")
        except TimeoutError:
            log.warning("the other workers are not known yet: the state store does not answer")
        return self.present()
