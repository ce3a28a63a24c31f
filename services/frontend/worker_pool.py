"""Links to all workers of the mesh, following the directory."""

import asyncio
import logging
from collections.abc import Callable

from mesh.membership import ChangeKind, Member, MemberChange
from mesh.tasks import TaskSet
from services.frontend.metrics import FrontendMetrics
from services.frontend.worker_link import WorkerLink

log = logging.getLogger(__name__)

WORKER_ROLE = "worker"


class WorkerPool:
    """One link for each incarnation of a worker; those that left stay until their last request has ended."""

    def __init__(
        self,
        frontend_id: str,
        metrics: FrontendMetrics,
        clock: Callable[[], float],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """`on_failed` is told when a link died by a bug of ours."""
        self._frontend_id = frontend_id
        self._metrics = metrics
        self._clock = clock
        self._on_failed = on_failed
        self._links: dict[str, WorkerLink] = {}
        self._tasks = TaskSet("worker-pool")
        self._joined = asyncio.Event()

    def on_change(self, change: MemberChange) -> None:
        """Follow the directory; changes of other roles are ignored."""
        if change.member.role != WORKER_ROLE:
            return
        if change.kind is ChangeKind.JOINED:
            self._join(change.member)
        else:
            self._leave(change.member)

    def link(self, instance_id: str) -> WorkerLink | None:
        """The link to an instance that is in the mesh."""
        return self._links.get(instance_id)

    def links(self) -> tuple[WorkerLink, ...]:
        """All links to workers that are in the mesh, by instance id."""
        return tuple(self._links[instance_id] for instance_id in sorted(self._links))

    def connected(self, model: str) -> tuple[WorkerLink, ...]:
        """Those that take requests for a model, by instance id."""
        return tuple(link for link in self.links() if link.is_connected and link.model == model)

    async def wait_connected(self, instance_id: str, timeout_s: float) -> WorkerLink | None:
        """The link to an instance once it is connected; None if that does not happen in time."""
        link = self._links.get(instance_id)
        if link is not None and link.is_connected:
            return link
        try:
            async with asyncio.timeout(timeout_s):
                while (link := self._links.get(instance_id)) is None:
                    self._joined.clear()
                    await self._joined.wait()
                await link.connected.wait()
        except TimeoutError:
            return None
        return link if link.is_connected else None

    async def stop(self) -> None:
        """Close all streams; the workers abort what still runs on them."""
        self._links.clear()
        await self._tasks.cancel()

    def _join(self, member: Member) -> None:
        known = self._links.get(member.member_id)
        if known is not None:
            if known.member.incarnation_id == member.incarnation_id:
                return
            known.leave()
        link = WorkerLink(member, self._frontend_id, self._metrics, self._clock)
        self._links[member.member_id] = link
        self._tasks.spawn(link.run(), name=member.member_id, on_error=self._on_failed)
        self._joined.set()
        log.info("worker joined", extra={"instance_id": member.member_id, "address": member.address})

    def _leave(self, member: Member) -> None:
        link = self._links.get(member.member_id)
        if link is None or link.member.incarnation_id != member.incarnation_id:
            return
        del self._links[member.member_id]
        link.leave()
        log.info("worker left", extra={"instance_id": member.member_id, "requests": link.requests})
