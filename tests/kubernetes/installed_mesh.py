"""The chart, installed by helm on a cluster whose kubelet runs simulated engines."""

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from controlplane.model.autoscale_record import ScaleRecord
from mesh.runtime import system_runtime
from mesh.store import open_store
from mesh.store.interface import StateStore
from services.operator.model_resource import API_VERSION, OWNER_LABEL, PLURAL
from tests.deploy.test_helm_chart import CHART, helm
from tests.in_time import eventually
from tests.kubernetes.api_server import MERGE_PATCH, ApiServer, Manifest, Refused
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.mesh.running_mesh import PENSTOCK

RELEASE: Final = "mesh"
NAMESPACE: Final = "serving"
MODEL: Final = "demo-large"
RESOURCE: Final = f"{RELEASE}-worker-{MODEL}"
PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
MODELS: Final = f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
COMMAND_S: Final = 120.0
READY_S: Final = 180.0
DRAIN_S: Final = 60
WORKER_ARGS: Final = ("--engine-arg=time_scale=4", "--kv-host=127.0.0.1")
"""Some 40 ms for a token: streams last, and who reads them keeps up. UCX gets no connection to any other address of the
loopback than this, where pods have theirs."""


class InstalledMesh:
    """Of one model, with two operators."""

    def __init__(self, api: ApiServer, cluster: Cluster, kubelet: Kubelet, store: str, folder: Path) -> None:
        self.api = api
        self.kubelet = kubelet
        self._cluster = cluster
        self._store = store
        self._values = folder / "values.yaml"
        self.key = "none"
        self.url = ""
        """Of the frontend's pod: no proxy serves the addresses of services here."""

    def install(self, **values: Any) -> None:
        """Or upgrade: with two instances, unless `values` say otherwise. It is not waited for."""
        given = {
            "store": self._store,
            "drainSeconds": DRAIN_S,
            "operator": {"replicas": 2},
            "worker": {"engine": "simulated", "startupSeconds": int(READY_S), "args": [*WORKER_ARGS]},
            "workers": [{"name": MODEL, "model": MODEL, "replicas": 2, "gpusPerReplica": 0}],
            **values,
        }
        self._values.write_text(yaml.safe_dump(given))
        command = [helm(), "upgrade", "--install", RELEASE, str(CHART), "-f", str(self._values)]
        command += ["--namespace", NAMESPACE, "--create-namespace", "--kubeconfig", str(self._cluster.kubeconfig)]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        assert installed.returncode == 0, installed.stderr

    def wait_until_serving(self, replicas: int) -> None:
        """Until all pods are ready and the model has so many instances."""
        eventually(lambda: self.is_as_wanted(replicas), READY_S, lambda: f"{replicas} instances serve: {self.story()}")
        eventually(
            lambda: all(_is_ready(pod) for pod in self.pods()), READY_S, lambda: f"all pods are ready: {self.story()}"
        )
        (frontend,) = self.pods("penstock.io/role=frontend")
        self.url = f"http://{frontend['status']['podIP']}:8000"

    def is_as_wanted(self, replicas: int) -> bool:
        """Whether the model says that exactly so many instances serve, and exactly so many pods are there."""
        model = self.model()
        status = model.get("status", {})
        (ready,) = status.get("conditions", [{}])
        observed = status.get("observedGeneration") == model["metadata"]["generation"]
        is_so = ready.get("status") == "True" and status.get("readyReplicas") == replicas == status.get("replicas")
        return observed and is_so and len(self.workers()) == replicas

    def pods(self, labels: str = "") -> list[Manifest]:
        found: list[Manifest] = self.api.get(PODS, labelSelector=labels)["items"]
        return found

    def workers(self) -> dict[str, Manifest]:
        """The model's pods by name."""
        return {pod["metadata"]["name"]: pod for pod in self.pods(f"{OWNER_LABEL}={RESOURCE}")}

    def model(self) -> Manifest:
        found: Manifest = self.api.get(f"{MODELS}/{RESOURCE}")
        return found

    def scale(self, replicas: int) -> None:
        """As a HorizontalPodAutoscaler or `kubectl scale` does it."""
        path = f"{MODELS}/{RESOURCE}/scale"
        self.api.call("PATCH", path, {"spec": {"replicas": replicas}}, kind=MERGE_PATCH)

    def penstock(self, *arguments: str) -> str:
        """What a command of an operator prints."""
        command = (*PENSTOCK, *arguments, "--store", self._store)
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def choose(self, replicas: int, *leave_first: str) -> None:
        """As autoscaling decides it, until `forget_choice`."""
        record = ScaleRecord(MODEL, replicas, leave_first=leave_first, why="a test wants it")
        self._in_store(lambda store: store.put(record.key, msgspec.json.encode(record)))

    def forget_choice(self) -> None:
        self._in_store(lambda store: store.delete(ScaleRecord(MODEL, 0).key))

    def leader(self) -> str:
        """Name of the operator that leads; empty: nobody does."""
        return str(json.loads(self.penstock("status", "--json"))["leaders"].get("operator", {}).get("member_id", ""))

    def _in_store(self, work: Callable[[StateStore], Awaitable[object]]) -> None:
        async def opened() -> None:
            store = open_store(self._store, system_runtime())
            try:
                await work(store)
            finally:
                await store.close()

        asyncio.run(opened())

    def story(self) -> str:
        """How far it is, for who wonders why it does not come up."""
        try:
            status = self.model().get("status", {})
        except Refused as refused:
            return str(refused)
        unready = [pod["metadata"]["name"] for pod in self.pods() if not _is_ready(pod)]
        return f"{json.dumps(status)}; not ready: {unready}; logs: {self.kubelet.folder}"


def _is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)
