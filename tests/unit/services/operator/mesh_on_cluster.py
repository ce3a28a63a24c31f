"""A mesh beside an API server: who has joined is what a test says, and what becomes of pods."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from lightkube import AsyncClient, KubeConfig
from lightkube.config.models import Cluster as ClusterOfConfig
from lightkube.config.models import User

from mesh.membership import Directory, Member
from mesh.runtime import SystemClock
from mesh.store.embedded import EmbeddedStore
from services.operator.cluster import FIELD_MANAGER, Cluster
from services.operator.model_operator import ModelOperator
from services.operator.settings import OperatorSettings
from tests.unit.services.operator.fake_api_server import MODELS, NAMESPACE, FakeApiServer, Manifest


class Workers:
    """The mesh's directory: who has joined is what a test says."""

    def __init__(self) -> None:
        self.joined: dict[str, str] = {}
        self._listeners: list[Callable[[Any], None]] = []

    def members(self, _role: str) -> tuple[Member, ...]:
        return tuple(Member("worker", name, incarnation, "", "") for name, incarnation in self.joined.items())

    def subscribe(self, heard: Callable[[Any], None]) -> Callable[[], None]:
        self._listeners.append(heard)
        return lambda: self._listeners.remove(heard)

    def join(self, *names: str) -> None:
        for name in names:
            self.joined[name] = f"{name} {len(self.joined)}"
        for heard in tuple(self._listeners):
            heard(None)

    def leave(self, name: str) -> None:
        del self.joined[name]
        for heard in tuple(self._listeners):
            heard(None)


def model(name: str, replicas: int, **spec: Any) -> Manifest:
    container: Manifest = {
        "name": "worker",
        "image": "penstock/worker-cpu",
        "args": ["serve", "worker", f"--model={name}"],
    }
    container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    template = {"metadata": {"labels": {"app": "mesh"}}, "spec": {"containers": [container]}}
    spec = {"replicas": replicas, "template": template, **spec}
    return {"apiVersion": "penstock.io/v1alpha1", "kind": "PenstockModel", "metadata": {"name": name}, "spec": spec}


class Mesh:
    """An API server, a directory and a state store, and operators beside them."""

    def __init__(self, server: FakeApiServer, store: EmbeddedStore) -> None:
        self.server = server
        self.store = store
        self.workers = Workers()

    @asynccontextmanager
    async def led(self) -> AsyncIterator[None]:
        """An operator that leads meanwhile."""
        config = KubeConfig.from_one(cluster=ClusterOfConfig(self.server.url), user=User(), namespace=NAMESPACE)
        cluster = Cluster(AsyncClient(config.get(), field_manager=FIELD_MANAGER, trust_env=False))
        directory = cast(Directory, self.workers)
        operator = ModelOperator(cluster, self.store, directory, SystemClock(), OperatorSettings(max_pods=8))
        tasks = [asyncio.create_task(operator.follow()), asyncio.create_task(operator.lead())]
        try:
            yield
            assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await cluster.close()

    async def has(self, *pods: str) -> None:
        """Wait until exactly these live, and let those that are new run and join."""
        await self.server.until(lambda: self.server.living_pods() == set(pods))
        for pod in pods:
            if pod not in self.workers.joined:
                self.server.runs(pod)
                self.workers.join(pod)

    def ready(self, name: str) -> Manifest:
        """The condition of a model."""
        conditions = self.server.get(MODELS, name).get("status", {}).get("conditions", [{}])
        return cast(Manifest, conditions[0])

    async def is_ready(self, name: str, replicas: int) -> None:
        def reached() -> bool:
            status = self.server.get(MODELS, name).get("status", {})
            return status.get("readyReplicas") == replicas and self.ready(name).get("status") == "True"

        await self.server.until(reached)

    def ends(self, pod: str, exit_status: int, message: str = "") -> None:
        """Its worker has left the mesh, and its process is over."""
        self.workers.joined.pop(pod, None)
        self.server.ends(pod, exit_status, message)
