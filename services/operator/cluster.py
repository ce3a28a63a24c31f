"""The few calls to a cluster's API server, by lightkube; every one has a deadline, and fails with `ClusterError`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar, cast

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Pod as PodResource
from lightkube.types import PatchType

from mesh.errors import ClusterError, ConfigurationError
from services.operator.followed_objects import Named
from services.operator.model_resource import GROUP, KIND, OWNER_LABEL, PLURAL, VERSION, ModelResource
from services.operator.pod import Pod

FIELD_MANAGER: Final = "penstock-operator"
DEADLINE_S: Final = 10.0
WATCH_S: Final = 240
"""How long the API server keeps a watch open; another one is then begun."""
SILENT_S: Final = 270.0
"""A watch that says nothing for longer is dead."""
NOT_FOUND, ALREADY_EXISTS = 404, 409

Seen = TypeVar("Seen", bound=Named)

MODELS: Final[Any] = create_namespaced_resource(GROUP, VERSION, KIND, PLURAL)


class Cluster:
    """One namespace of a cluster."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.namespace: str = client.namespace
        self.pods = ClusterObjects(client, PodResource, {OWNER_LABEL: None}, Pod.read)
        self.models = ClusterObjects(client, MODELS, {}, ModelResource.read)

    async def create_pod(self, manifest: Mapping[str, Any]) -> Pod | None:
        """As the cluster has it then; None where there is one of this name."""
        with _as_cluster_errors():
            try:
                created = await self._client.create(cast(PodResource, PodResource.from_dict(dict(manifest))))
            except ApiError as error:
                if error.status.code == ALREADY_EXISTS and error.status.reason == "AlreadyExists":
                    return None
                raise
        return Pod.read(created.to_dict())

    async def delete_pod(self, name: str, grace_s: int | None = None) -> None:
        """Have it end within its own grace period unless another one is given; no effect where there is none."""
        with _as_cluster_errors(besides=NOT_FOUND):
            await self._client.delete(PodResource, name, grace_period=grace_s)

    async def set_finalizers(self, resource: ModelResource, finalizers: tuple[str, ...]) -> None:
        """Of this version of the resource: one that somebody has changed meanwhile is left as it is."""
        metadata = {"finalizers": list(finalizers), "resourceVersion": resource.version}
        with _as_cluster_errors(besides=NOT_FOUND):
            await self._client.patch(MODELS, resource.name, {"metadata": metadata}, patch_type=PatchType.MERGE)

    async def set_status(self, name: str, status: Mapping[str, Any]) -> None:
        """By server-side apply: what others have written there stays."""
        applied = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": name}, "status": status}
        with _as_cluster_errors(besides=NOT_FOUND):
            await self._client.patch(
                MODELS.Status, name, applied, patch_type=PatchType.APPLY, force=True, field_manager=FIELD_MANAGER
            )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class ClusterObjects(Generic[Seen]):
    """The objects of one kind and label that `read` makes something of: a `Source`."""

    def __init__(
        self,
        client: AsyncClient,
        kind: Any,
        labels: Mapping[str, None],
        read: Callable[[Mapping[str, Any]], Seen | None],
    ) -> None:
        """`labels`: that they have, whatever the values."""
        self._client = client
        self._kind = kind
        self._labels: dict[str, Any] = dict(labels)
        self._read = read

    async def list(self) -> tuple[tuple[Seen, ...], str]:
        with _as_cluster_errors():
            async with asyncio.timeout(DEADLINE_S):
                listed = self._client.list(self._kind, labels=self._labels)
                found = [self._read(_as_dict(each)) async for each in listed]
        return tuple(each for each in found if each is not None), listed.resourceVersion

    async def watch(self, version: str) -> AsyncIterator[tuple[bool, Seen]]:
        # An async generator, which lightkube's types do not say.
        events: Any = self._client.watch(
            self._kind, labels=self._labels, server_timeout=WATCH_S, resource_version=version
        )
        try:
            while True:
                with _as_cluster_errors():
                    async with asyncio.timeout(SILENT_S):
                        event = await anext(events, None)
                if event is None:
                    return
                kind, changed = event
                seen = self._read(_as_dict(changed))
                if seen is not None:
                    yield kind != "DELETED", seen
        finally:
            await events.aclose()


def connect(namespace: str) -> Cluster:
    """To the cluster that this process runs in, or that of KUBECONFIG. Raises `ConfigurationError`."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it tells of every request
    try:
        return Cluster(AsyncClient(namespace=namespace or None, field_manager=FIELD_MANAGER, trust_env=True))
    except (ConfigError, OSError) as error:
        raise ConfigurationError(
            f"no cluster: {error}; run the operator in a pod, or say in KUBECONFIG how to reach one"
        ) from error


def _as_dict(shown: Any) -> Mapping[str, Any]:
    """Generic resources are dictionaries but for their metadata."""
    found: Mapping[str, Any] = shown.to_dict()
    return found


@contextmanager
def _as_cluster_errors(besides: int | None = None) -> Iterator[None]:
    """`besides`: the code of an answer that is none."""
    try:
        yield
    except ApiError as error:
        if error.status.code != besides:
            raise ClusterError(f"the API server refused ({error.status.code}): {error.status.message}") from error
    except msgspec.ValidationError as error:
        raise ClusterError(f"the API server's answer cannot be read: {error}") from error
    except (httpx2.HTTPError, TimeoutError) as error:
        raise ClusterError(f"no answer from the API server: {type(error).__name__} {error}") from error
