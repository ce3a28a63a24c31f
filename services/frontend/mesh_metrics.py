"""The metrics of the whole mesh at one address, the endpoint's /metrics, and the load that answers have in a header."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import grpc
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from mesh.membership import ChangeKind, Member, MemberChange
from mesh.metric_families import metric_families, one_page
from mesh.rpc.member_channels import MemberChannels
from mesh.runtime import Threads, Transport
from mesh.tasks import TaskSet
from mesh.vllm_metrics import PREFIX
from penstock.v1 import member_pb2, member_pb2_grpc

log = logging.getLogger(__name__)

ROLES: Final = frozenset({"worker", "frontend"})
"""Those that export metrics under vLLM's names."""
DEADLINE_S: Final = 1.0
FRESH_S: Final = 1.0
"""What was read within this time is everybody's: pages and headers cost the mesh one round of questions a second at
most, however often they are asked for."""

Families = Sequence[member_pb2.MetricFamily]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What stands in the header of ORCA (Open Request Cost Aggregation, of Envoy and gRPC): the two numbers that a
    vLLM server tells, of all instances of some models."""

    num_requests_waiting: float
    """Sum of the requests that wait at the instances."""
    kv_cache_usage_perc: float
    """Mean share of the KV cache in use, 0 to 1."""


@dataclass(frozen=True)
class MeshReading:
    """What the members said at one time."""

    members: Sequence[Families]

    def load(self, models: Sequence[str]) -> EngineLoad | None:
        """None where no instance of these models has answered."""
        loads = [each for model in models for each in self._loads.get(model, ())]
        if not loads:
            return None
        return EngineLoad(
            sum(each.num_requests_waiting for each in loads),
            sum(each.kv_cache_usage_perc for each in loads) / len(loads),
        )

    @cached_property
    def _loads(self) -> Mapping[str, Sequence[EngineLoad]]:
        """Of each instance, by model."""
        loads: dict[str, list[EngineLoad]] = {}
        for families in self.members:
            usage, waiting = _values(families, "kv_cache_usage_perc"), _values(families, "num_requests_waiting")
            for model in usage.keys() & waiting.keys():
                loads.setdefault(model, []).append(EngineLoad(waiting[model], usage[model]))
        return loads


class MeshMetrics:
    """Asks every worker and every other frontend for its metrics, when somebody wants them. `stop` it."""

    def __init__(
        self,
        member_id: str,
        registry: CollectorRegistry,
        unread: Gauge,
        transport: Transport,
        threads: Threads,
        clock: Callable[[], float],
    ) -> None:
        """`registry`: this frontend's own metrics; `unread`: how many members did not answer."""
        self._member_id = member_id
        self._registry = registry
        self._unread = unread
        self._threads = threads
        self._clock = clock
        self._members: dict[tuple[str, str], Member] = {}
        self._latest_unread: list[str] = []
        self._channels = MemberChannels(transport)
        self._read_s = -FRESH_S
        self._reading: asyncio.Task[MeshReading] | None = None
        self._tasks = TaskSet("mesh metrics")

    def on_change(self, change: MemberChange) -> None:
        """Follow the directory; this frontend itself and other roles are ignored."""
        member = change.member
        key = (member.role, member.member_id)
        if member.role not in ROLES or key == ("frontend", self._member_id):
            return
        known = self._members.get(key)
        if change.kind is not ChangeKind.LEFT:
            self._members[key] = member
            if known is not None and known.address != member.address:
                self._channels.close(known)
        elif known is not None and known.incarnation_id == member.incarnation_id:
            del self._members[key]
            self._channels.close(member)

    async def page(self) -> bytes:
        """This frontend's own metrics, and under vLLM's names those of the mesh, in Prometheus's text format."""
        reading = await self.read()
        return await self._threads.run(self._page, reading)

    async def read(self) -> MeshReading:
        """What the members say under vLLM's names, at most `FRESH_S` old. One that does not answer within `DEADLINE_S`
        is missing."""
        now_s = self._clock()
        if self._reading is None or (self._reading.done() and now_s - self._read_s >= FRESH_S):
            self._read_s = now_s
            self._reading = self._tasks.spawn(self._ask_all(), name="read the members")
        return await asyncio.shield(self._reading)

    async def stop(self) -> None:
        """Close every connection."""
        await self._tasks.cancel()
        await self._channels.stop()

    async def _ask_all(self) -> MeshReading:
        members = [self._members[key] for key in sorted(self._members)]
        own = self._threads.run(metric_families, self._registry, PREFIX, self._member_id)
        first, *answers = await asyncio.gather(own, *(self._ask(member) for member in members))
        unread = [
            f"{member.role}/{member.member_id}"
            for member, answer in zip(members, answers, strict=True)
            if answer is None
        ]
        self._unread.set(len(unread))
        if unread and unread != self._latest_unread:
            log.warning("members did not say their metrics", extra={"members": unread[:10], "count": len(unread)})
        self._latest_unread = unread
        return MeshReading([families for families in (first, *answers) if families is not None])

    async def _ask(self, member: Member) -> Families | None:
        stub = member_pb2_grpc.MemberStub(self._channels.to(member))  # type: ignore[no-untyped-call]
        try:
            answer: member_pb2.GetMetricsResponse = await stub.GetMetrics(
                member_pb2.GetMetricsRequest(prefix=PREFIX), timeout=DEADLINE_S
            )
        except grpc.aio.AioRpcError:  # members of a former release answer UNIMPLEMENTED
            return None
        return answer.families

    def _page(self, reading: MeshReading) -> bytes:
        own = metric_families(self._registry, "", "", leave_out=PREFIX)
        return one_page([own, *reading.members])


def _values(families: Families, name: str) -> dict[str, float]:
    """The samples of a gauge of one member, by model."""
    for family in families:
        if family.name == PREFIX + name:
            parsed = text_string_to_metric_families(family.text.decode())
            return {each.labels.get("model_name", ""): each.value for one in parsed for each in one.samples}
    return {}
