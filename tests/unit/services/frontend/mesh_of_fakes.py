"""A whole frontend on real ports, between fake workers and a fake scheduler."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import httpx
import openai
from prometheus_client import CollectorRegistry

from mesh.membership import Member
from mesh.role import RoleContext
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, system_runtime
from mesh.store import StateStore, open_store
from services.frontend.cascade.cascades import Cascades
from services.frontend.parser_process.launcher import Launcher, ModuleLauncher
from services.frontend.requests.service import FrontendService
from services.frontend.role import FrontendRole
from services.frontend.settings import FrontendSettings
from services.frontend.text.model_text import ModelText
from tests.unit.services.frontend.fakes import FakeDirectory, FakeScheduler, FakeWorker, Script, always

NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP: each would read all of the machine's certificates, which takes 40 ms of CPU."""


def without_vllm() -> ModuleLauncher:
    """As where vLLM is not installed: whatever needs its process is refused, rather than waited for."""
    return ModuleLauncher(needs="no_such_package")


@dataclass
class MeshOfFakes:
    """What a test can reach."""

    role: FrontendRole
    service: FrontendService
    directory: FakeDirectory
    scheduler: FakeScheduler
    url: str
    rpc_address: str
    registry: CollectorRegistry
    text: ModelText
    model_path: Path
    store: StateStore
    workers: list[FakeWorker] = field(default_factory=list)

    @property
    def cascades(self) -> Cascades:
        """Those in force."""
        assert self.role.cascade is not None
        return self.role.cascade.cascades

    @property
    def worker(self) -> FakeWorker:
        """The first one."""
        return self.workers[0]

    def client(self, api_key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        """The official client, without retries."""
        options.setdefault("http_client", openai.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES))
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20, **options)

    def http(self) -> httpx.AsyncClient:
        """For what the official client would not send."""
        return httpx.AsyncClient(base_url=self.url, timeout=20, verify=NO_CERTIFICATES)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text."""
        return self.text.chunked.encode(text)

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 if there is none yet."""
        return self.registry.get_sample_value(f"penstock_frontend_{name}", labels) or 0.0

    async def add_worker(
        self,
        script: Script,
        *,
        step_s: float = 0.0,
        attributes: Mapping[str, str] = MappingProxyType({}),
        **fields: Any,
    ) -> FakeWorker:
        """Start and announce one, with more `attributes` if any, and wait until the frontend is connected to it."""
        worker = FakeWorker(script, step_s=step_s, **fields)
        await worker.start()
        self.workers.append(worker)
        self.directory.join(worker.member(str(self.model_path), **attributes))
        assert await self.service.pool.wait_connected(worker.instance_id, 5.0) is not None
        return worker

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """See `until`."""
        await until(condition, timeout_s)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Let the event loop turn until something has happened."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a counter of another part has no event
            await asyncio.sleep(0.001)


@asynccontextmanager
async def mesh_of_fakes(
    model_path: Path,
    script: Script | None = None,
    launcher: Launcher | None = None,
    member_id: str = "frontend-0",
    **settings: Any,
) -> AsyncIterator[MeshOfFakes]:
    """A running frontend with, given a script, one worker."""
    directory, registry, server = FakeDirectory(), CollectorRegistry(), RpcServer(GrpcTransport())
    store = open_store("embedded:", system_runtime())
    scheduler = FakeScheduler(always("worker-0"))
    await scheduler.start()
    directory.join(scheduler.member)
    role = FrontendRole(FrontendSettings(http_port=0, **settings), launcher=launcher or without_vllm())
    attributes = await role.start(replace(context_of(directory, registry, server, store), member_id=member_id))
    await server.start()
    assert role.service is not None
    mesh = MeshOfFakes(
        role,
        role.service,
        directory,
        scheduler,
        f"http://{attributes['http_address']}",
        server.address,
        registry,
        ModelText.load(model_path, SystemClock().unix_s),
        model_path,
        store,
    )
    try:
        await mesh.until(lambda: mesh.service.placement.connected)
        if script is not None:
            await mesh.add_worker(script)
        yield mesh
    finally:
        await role.stop()
        for worker in mesh.workers:
            await worker.stop()
        await scheduler.stop()
        await server.stop(0)
        await store.close()


@asynccontextmanager
async def frontend_between(
    members: Sequence[Member], member_id: str = "frontend-0", launcher: Launcher | None = None, **settings: Any
) -> AsyncIterator[str]:
    """A frontend among members that run elsewhere, connected to all of them; yields its URL."""
    directory, registry, server = FakeDirectory(), CollectorRegistry(), RpcServer(GrpcTransport())
    store = open_store("embedded:", system_runtime())
    for member in members:
        directory.join(member)
    role = FrontendRole(FrontendSettings(http_port=0, **settings), launcher=launcher or without_vllm())
    attributes = await role.start(replace(context_of(directory, registry, server, store), member_id=member_id))
    assert role.service is not None
    try:
        for link in role.service.pool.links():
            assert await role.service.pool.wait_connected(link.instance_id, 5.0) is not None
        yield f"http://{attributes['http_address']}"
    finally:
        await role.stop()
        await store.close()


def context_of(
    directory: FakeDirectory, registry: CollectorRegistry, server: RpcServer, store: StateStore
) -> RoleContext:
    """Of a frontend."""
    return RoleContext(
        "frontend",
        "frontend-0",
        "first",
        server.address,
        store,
        cast(Any, directory),
        server,
        registry,
        system_runtime(),
    )
