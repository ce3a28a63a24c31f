"""Follows the `PenstockModel`s of a namespace while it leads: puts the parts of the operator together."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.manager import DeploymentManager, Ended, StartInstance
from controlplane.deployment.replicas import ReplicaState, Shape
from controlplane.model.autoscale_record import ScaleRecord
from mesh.errors import ClusterError, ConfigurationError
from mesh.membership import Directory
from mesh.runtime import Clock
from mesh.store.interface import StateStore
from mesh.tasks import TaskSet
from services.cli.supervisor.deployer import Deployer
from services.cli.supervisor.process_actuator import ProcessActuator
from services.cli.supervisor.supervisor import Supervisor
from services.operator.followed_objects import FollowedObjects, Source
from services.operator.model_resource import FINALIZER, ModelResource, by_model
from services.operator.model_status import model_status
from services.operator.pod import Pod
from services.operator.pod_actuator import PodActuator
from services.operator.pod_launcher import PodLauncher, Pods, PodSpec
from services.operator.settings import OperatorSettings

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Between two looks at the resources, if nothing is heard of them sooner."""
NAME: Final = "kubernetes"
"""Under which the deployment's status stands in the state store."""


class ClusterCalls(Pods, Protocol):
    """What the operator asks of a cluster; `Cluster` is one. Every method raises `ClusterError`."""

    @property
    def pods(self) -> Source[Pod]:
        """Those of the operator."""

    @property
    def models(self) -> Source[ModelResource]:
        """All of the namespace."""

    async def set_finalizers(self, resource: ModelResource, finalizers: tuple[str, ...]) -> None:
        """Of this version of the resource alone."""

    async def set_status(self, name: str, status: Mapping[str, Any]) -> None:
        """Of the resource of this name."""


class ModelOperator:
    """Hears of resources and pods all the time, so that it can lead at once; acts only within `lead`."""

    def __init__(
        self, cluster: ClusterCalls, store: StateStore, directory: Directory, clock: Clock, settings: OperatorSettings
    ) -> None:
        self.models: FollowedObjects[ModelResource] = FollowedObjects(cluster.models)
        self.pods: FollowedObjects[Pod] = FollowedObjects(cluster.pods)
        self.cluster = cluster
        self.store = store
        self.directory = directory
        self.clock = clock
        self.settings = settings

    async def follow(self) -> None:
        """Keep up with the cluster, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.models.follow())
            group.create_task(self.pods.follow())

    async def lead(self) -> None:
        """Take over the pods that are there and have as many as are wanted, until cancelled; then they are left as they
        are."""
        await self.models.until(lambda: self.models.is_heard)
        await self.pods.until(lambda: self.pods.is_heard)
        tasks = TaskSet("operator")
        lead = _Lead(self, tasks)
        try:
            await lead.run()
        finally:
            await lead.let_go()
            await tasks.cancel()


class _Lead:
    """What one leader keeps, from when it begins to lead to when it leads no more."""

    def __init__(self, operator: ModelOperator, tasks: TaskSet) -> None:
        self._cluster = operator.cluster
        self._clock = operator.clock
        self._models = operator.models
        self._pods = operator.pods
        self._tasks = tasks
        settings = operator.settings
        self._drain_s = settings.instance_drain_s
        self._running, self._refused = by_model(self._models.objects.values())
        launcher = PodLauncher(self._cluster, self._pods, self._resource_of, tasks)
        self._supervisor = Supervisor(launcher, _say)
        gpus = GpuPool(0, settings.max_pods, places="pods (--max-pods)")
        adopted = self._adopt(launcher, gpus)
        supervised = ProcessActuator(self._supervisor, operator.directory, self._spec)
        self._actuator = PodActuator(supervised, self._pods)
        manager = DeploymentManager(NAME, gpus, settings.ready_timeout_s, adopted)
        self._deployer = Deployer(manager, operator.store, self._actuator, self._drain_s, self._clock.now_s, _say)
        self._draining: set[str] = set()
        """Instances of resources that are being deleted."""

    async def run(self) -> None:
        """For ever."""
        self._serve()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deployer.follow())
            group.create_task(self._work())

    async def let_go(self) -> None:
        """End nothing: the next leader adopts it."""
        await self._supervisor.let_go()

    def _adopt(self, launcher: PodLauncher, gpus: GpuPool) -> dict[str, dict[str, Shape]]:
        """Instances by model and name. What is leaving already leaves by itself."""
        adopted: dict[str, dict[str, Shape]] = {}
        models = {each.name: each.model for each in self._models.objects.values()}
        for pod in self._pods.objects.values():
            model = models.get(pod.resource)
            if pod.is_leaving or model is None or pod.instance in self._supervisor.names():
                continue
            gpus.take(pod.instance, gpus.room_of(pod.shape))
            adopted.setdefault(model, {})[pod.instance] = pod.shape
            spec = PodSpec(pod.instance, "worker", (), model=model, shape=pod.shape)
            self._supervisor.adopt(spec, launcher.process(pod))
        return adopted

    def _resource_of(self, model: str) -> ModelResource:
        found = self._running.get(model)
        if found is None:
            raise ConfigurationError(f"no PenstockModel runs {model}: apply one")
        return found

    def _spec(self, instance: StartInstance) -> PodSpec:
        self._resource_of(instance.model)
        return PodSpec(instance.name, "worker", (), model=instance.model, shape=instance.shape)

    async def _work(self) -> None:
        """After every change, and now and then."""
        news = asyncio.Event()
        ends: list[Callable[[], None]] = [each.subscribe(news.set) for each in (self._models, self._pods)]
        try:
            while True:
                news.clear()
                try:
                    await self._turn()
                except ClusterError as error:
                    log.warning("the API server is not answering; trying again", extra={"error": str(error)})
                    await self._clock.sleep(LOOK_S)
                try:
                    async with asyncio.timeout(LOOK_S):
                        await news.wait()
                except TimeoutError:
                    continue
        finally:
            for end in ends:
                end()

    async def _turn(self) -> None:
        """Raises `ClusterError`."""
        resources = tuple(self._models.objects.values())
        self._serve()
        for each in resources:
            if not each.is_leaving and FINALIZER not in each.finalizers:
                await self._cluster.set_finalizers(each, (*each.finalizers, FINALIZER))
        for each in resources:
            if each.is_leaving:
                await self._take_leave(each)
        await self._sweep()
        for each in resources:
            await self._show(each)

    def _serve(self) -> None:
        """Have the deployer know what the resources want."""
        self._running, self._refused = by_model(self._models.objects.values())
        # Pods are started only for what cannot vanish under them.
        held = {model: each for model, each in self._running.items() if FINALIZER in each.finalizers}
        shapes = {model: each.shape for model, each in held.items()}
        asked = {
            model: ScaleRecord(model, each.replicas, why=f"as the PenstockModel {each.name} says")
            for model, each in held.items()
        }
        self._deployer.serve(shapes, asked)

    async def _take_leave(self, resource: ModelResource) -> None:
        """Drain its instances, and let it go when they are gone."""
        pods = self._of(resource)
        for pod in pods:
            if pod.instance not in self._draining and pod.instance in self._supervisor.names():
                self._draining.add(pod.instance)
                self._tasks.spawn(self._drain(pod.instance), name=f"drain of {pod.name}")
        if not pods and FINALIZER in resource.finalizers:
            left = tuple(each for each in resource.finalizers if each != FINALIZER)
            await self._cluster.set_finalizers(resource, left)

    async def _drain(self, instance: str) -> None:
        try:
            await self._actuator.drain(instance, self._drain_s)
        finally:
            self._draining.discard(instance)
        # Else it would count as drained by hand, when another resource of the model comes.
        for each in self._deployer.manager.replicas:
            if each.name == instance and each.state is not ReplicaState.ENDING:
                await self._deployer.handle(Ended(instance))

    async def _sweep(self) -> None:
        """Delete what nobody keeps: instances that were drained by somebody else, and what a former leader has started
        in its last moment."""
        kept = self._supervisor.names()
        for pod in tuple(self._pods.objects.values()):
            if pod.instance not in kept and not pod.is_leaving:
                await self._cluster.delete_pod(pod.name)

    async def _show(self, resource: ModelResource) -> None:
        joined = self._actuator.observe().joined
        now = datetime.fromtimestamp(self._clock.unix_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        deployment = self._deployer.manager.status
        if deployment is None:  # the first look is under way
            return
        refused = self._refused.get(resource.name, "")
        status = model_status(resource, self._of(resource), joined, deployment, refused, now)
        if status != resource.status:
            await self._cluster.set_status(resource.name, status)

    def _of(self, resource: ModelResource) -> list[Pod]:
        return [pod for pod in self._pods.objects.values() if pod.resource == resource.name]


def _say(line: str) -> None:
    log.warning(line)
