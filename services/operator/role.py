"""The operator's role: instances as pods of a Kubernetes cluster, by one operator at a time."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from controlplane.model.duties import OPERATOR
from mesh.errors import ConfigurationError
from mesh.leadership import Leadership, LeadershipMetrics, lead
from mesh.role import RoleContext
from mesh.tasks import TaskSet
from services.operator.model_operator import ModelOperator
from services.operator.settings import OperatorSettings

if TYPE_CHECKING:
    from services.operator.cluster import Cluster


class OperatorRole:
    """Several may run; the leader alone acts, and the next one takes its pods over."""

    name: ClassVar[str] = "operator"

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._tasks = TaskSet(self.name)
        self._failure: asyncio.Future[None] | None = None
        self._cluster: Cluster | None = None
        self._leadership: Leadership | None = None
        self._operator: ModelOperator | None = None
        self._leading: asyncio.Task[None] | None = None

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Hear of the cluster, and act where this operator leads. Raises `ConfigurationError`."""
        try:
            from services.operator.cluster import connect
        except ImportError as error:
            raise ConfigurationError(
                f"the operator needs a package that is not there ({error}): pip install 'penstock[kubernetes]'"
            ) from error
        self._failure = asyncio.get_running_loop().create_future()
        self._cluster = connect(self._settings.namespace)
        self._operator = ModelOperator(
            self._cluster, context.store, context.directory, context.runtime.clock, self._settings
        )
        self._tasks.spawn(self._operator.follow(), name="cluster", on_error=self._on_failed)
        self._leadership = lead(context, OPERATOR, LeadershipMetrics(context.registry), self._on_leading)
        self._tasks.spawn(self._leadership.run(), name="leadership", on_error=self._on_failed)
        return {"namespace": self._cluster.namespace}

    async def failed(self) -> None:
        """Raises what made it impossible to go on."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def drain(self) -> None:
        """Leave the pods to the next leader, as they are."""
        if self._leadership is not None:
            await self._leadership.resign()

    async def stop(self) -> None:
        """End nothing but this process's own part."""
        await self.drain()
        await self._tasks.cancel()
        if self._cluster is not None:
            await self._cluster.close()

    def _on_leading(self, leads: bool) -> None:
        if self._leading is not None:
            self._leading.cancel()
            self._leading = None
        if leads and self._operator is not None:
            self._leading = self._tasks.spawn(self._operator.lead(), name="lead", on_error=self._on_failed)

    def _on_failed(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)
