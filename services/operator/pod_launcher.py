"""Starts pods where a supervisor would start processes."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from controlplane.deployment.replicas import Shape
from mesh.backoff import Backoff
from mesh.errors import ClusterError, ConfigurationError
from mesh.tasks import TaskSet
from services.cli.supervisor.launcher import ProcessSpec
from services.operator.followed_objects import FollowedObjects
from services.operator.model_resource import ModelResource
from services.operator.pod import Pod

log = logging.getLogger(__name__)

LOST: Final = -1
"""Exit status of a pod that is gone before it said any: somebody deleted it by force, or its node is gone."""
FORMER_GONE_S: Final = 60.0
"""How long a start waits for a former pod of the same name to be gone."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class Pods(Protocol):
    """What the launcher asks of a cluster. Every method raises `ClusterError`."""

    namespace: str

    async def create_pod(self, manifest: Mapping[str, Any]) -> Pod | None:
        """None where there is one of this name."""

    async def delete_pod(self, name: str, grace_s: int | None = None) -> None:
        """Have it end within its own grace period unless another one is given; no effect where there is none."""


@dataclass(frozen=True, slots=True)
class PodSpec(ProcessSpec):
    """A worker that is to run in a pod, as its model's resource says at the time of each start."""

    model: str = ""
    shape: Shape = (1, 1)


class PodLauncher:
    """Implements `services.cli.supervisor.launcher.Launcher`."""

    def __init__(
        self, cluster: Pods, pods: FollowedObjects[Pod], resource_of: Callable[[str], ModelResource], tasks: TaskSet
    ) -> None:
        """`resource_of`: who runs a model; raises `ConfigurationError`. `tasks` outlives what is launched."""
        self._cluster = cluster
        self._pods = pods
        self._resource_of = resource_of
        self._tasks = tasks
        self._names: dict[str, str] = {}
        """Of pods, by instance, as last known."""

    async def launch(self, spec: ProcessSpec) -> "PodProcess":
        """Returns once the pod is created. One that runs under its name already is taken for it: the answer to an
        earlier try was lost. Raises OSError."""
        assert isinstance(spec, PodSpec)
        try:
            resource = self._resource_of(spec.model)
            name = self._names[spec.name] = resource.pod_name(spec.name)
            async with asyncio.timeout(FORMER_GONE_S):
                await self._make_room(name)
            created = await self._cluster.create_pod(resource.pod(spec.name, spec.shape))
        except TimeoutError:
            raise OSError(f"the former pod {name} is not gone after {FORMER_GONE_S:g} s") from None
        except (ClusterError, ConfigurationError) as error:
            raise OSError(str(error)) from error
        if created is None:
            created = self._pods.objects.get(name)
            if created is None or created.has_ended or created.is_leaving or created.instance != spec.name:
                raise OSError(f"there is another pod {name}")
        self._pods.note(created)
        return self.process(created)

    def log_of(self, name: str) -> str:
        """The command that shows it."""
        return f"kubectl logs -n {self._cluster.namespace} {self._names.get(name, name)}"

    def process(self, pod: Pod) -> "PodProcess":
        """A pod that is there, as what was launched."""
        self._names[pod.instance] = pod.name
        return PodProcess(self._cluster, self._pods, pod, self._tasks)

    async def _make_room(self, name: str) -> None:
        """A pod that has ended keeps its log until its name is needed. Raises `ClusterError`."""
        former = self._pods.objects.get(name)
        if former is None or not (former.has_ended or former.is_leaving):
            return
        if former.has_ended:
            await self._cluster.delete_pod(name, 0)
        await self._pods.until(lambda: _gone(self._pods, former))


class PodProcess:
    """Implements `services.cli.supervisor.launcher.Launched`."""

    def __init__(self, cluster: Pods, pods: FollowedObjects[Pod], pod: Pod, tasks: TaskSet) -> None:
        self._cluster = cluster
        self._pods = pods
        self._last = pod
        """As last seen: it is remembered when the pod is gone."""
        self._tasks = tasks

    @property
    def pid(self) -> int:
        """It runs on another machine."""
        return 0

    @property
    def returncode(self) -> int | None:
        """Its worker's exit status; `LOST` where the pod went without one."""
        shown = self._pods.objects.get(self._last.name)
        if shown is not None and shown.uid == self._last.uid:
            self._last = shown
        elif not self._last.has_ended:
            return LOST
        return self._last.exit_status

    @property
    def waits_for(self) -> str:
        """The resource's status says what the cluster says of its pods."""
        return ""

    async def wait(self) -> int:
        """Return its exit status once it has ended."""
        await self._pods.until(lambda: self.returncode is not None)
        status = self.returncode
        assert status is not None, "a pod that has ended stays so"
        return status

    def terminate(self) -> None:
        """Delete the pod: it has its own grace period to drain in."""
        self._tasks.spawn(self._delete(None), name=f"end of {self._last.name}")

    def kill_group(self) -> None:
        """Delete the pod at once; one that has ended stays, with its log."""
        if self.returncode is None:
            self._tasks.spawn(self._delete(0), name=f"kill of {self._last.name}")

    def exit_reason(self) -> str:
        """What the worker or the cluster said last of why it ended."""
        if self.returncode == LOST:
            return "its pod is gone: somebody deleted it, or its node is lost"
        return self._last.reason

    async def _delete(self, grace_s: int | None) -> None:
        """Again and again while the API server is away."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while not _gone(self._pods, self._last):
            try:
                await self._cluster.delete_pod(self._last.name, grace_s)
            except ClusterError as error:
                log.warning("a pod is not deleted yet", extra={"pod": self._last.name, "error": str(error)})
                await asyncio.sleep(backoff.next_s())
            else:
                return


def _gone(pods: FollowedObjects[Pod], pod: Pod) -> bool:
    shown = pods.objects.get(pod.name)
    return shown is None or shown.uid != pod.uid
