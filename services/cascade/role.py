"""The cascade router: judges answers by the cascades in the state store, and samples workloads for the planner."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import ClassVar

import httpx

from mesh.role import RoleContext
from mesh.tasks import TaskSet
from penstock.v1 import cascade_pb2_grpc
from services.cascade.cascades import Cascades
from services.cascade.judges.interface import Judge, JudgeContext
from services.cascade.judges.parse import JUDGES, make_judge
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.planner_link import PlannerLink
from services.cascade.sampling.samplers import Samplers, SamplingSettings
from services.cascade.sampling.tiers import TierClient
from services.cascade.service import CascadeService
from services.cascade.settings import CascadeSettings


class CascadeRole:
    """Judges the answers of every cascade in the state store."""

    name: ClassVar[str] = "cascade"

    def __init__(self, settings: CascadeSettings, http: httpx.AsyncBaseTransport | None = None) -> None:
        """`http` carries requests to frontends and to judges elsewhere; None: TCP."""
        self._settings = settings
        self._http = http
        self._tasks = TaskSet(self.name)
        self._failure: asyncio.Future[None] | None = None
        self._cascades: Cascades | None = None
        self._tiers: TierClient | None = None
        self._turns = count()

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Follow the cascades and serve the contract."""
        JUDGES.report_failures()
        self._failure = asyncio.get_running_loop().create_future()
        settings, runtime = self._settings, context.runtime
        clock = runtime.clock.now_s
        find_frontend = partial(self._frontend, context)
        self._tiers = TierClient(find_frontend, settings.sample_deadline_s, settings.mesh_api_key, self._http)
        sampling = SamplingSettings(settings.sample_window_s, settings.sample_requests, settings.sample_texts)
        metrics = CascadeMetrics(context.registry)
        report = PlannerLink(context.directory, context.store, context.member_id, runtime.transport, metrics).report
        samplers = Samplers(sampling, self._tiers, report, clock, runtime.entropy, metrics)
        judge_context = JudgeContext(
            find_frontend,
            settings.judge_deadline_s,
            api_key=settings.judge_api_key,
            mesh_key=settings.mesh_api_key,
            http=self._http,
        )

        def judges(text: str, rubric: str) -> Judge:
            return make_judge(text, replace(judge_context, rubric=rubric))

        cascades = Cascades(context.store, judges, settings.judge_deadline_s, clock, self._tasks, samplers, metrics)
        self._cascades = cascades
        self._tasks.spawn(cascades.follow(), name="follow the cascades", on_error=self._on_failed)
        self._tasks.spawn(samplers.run(), name="sample the workload", on_error=self._on_failed)
        service = CascadeService(context.store, cascades, samplers, metrics, settings.max_judging, clock)
        context.server.add(cascade_pb2_grpc.add_CascadeServicer_to_server, service, "penstock.v1.Cascade")
        return {}

    async def failed(self) -> None:
        """Raises what made it impossible to go on."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def drain(self) -> None:
        """Nothing to wait for: the server lets calls under way finish."""

    async def stop(self) -> None:
        """End sampling and close the connections of judges and tiers."""
        await self._tasks.cancel()
        if self._cascades is not None:
            await self._cascades.close()
        if self._tiers is not None:
            await self._tiers.close()

    def _frontend(self, context: RoleContext) -> str:
        """One frontend after the other, of those that speak plain HTTP: a judge knows no certificates."""
        addresses = [
            member.attributes["http_address"]
            for member in context.directory.members("frontend")
            if "http_address" in member.attributes and not member.attributes.get("tls")
        ]
        return f"http://{addresses[next(self._turns) % len(addresses)]}/v1" if addresses else ""

    def _on_failed(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
