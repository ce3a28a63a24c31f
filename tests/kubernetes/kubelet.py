"""A small kubelet: runs the containers of pods as processes of this machine."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

import httpx

from tests.kubernetes.api_server import MERGE_PATCH, UNANSWERED, ApiServer, Manifest
from tests.kubernetes.cluster import DIES_WITH_ITS_PARENT, Cluster

NODE: Final = "node"
TURN_S: Final = 0.2
PROBE_S: Final = 1.0
PROBE_DEADLINE_S: Final = 0.5
RESTART_S: Final = 1.0
STOP_S: Final = 20.0
SHOWN_OF_LOG: Final = 2048
"""Characters of a termination message."""
ADDRESSES: Final = IPv4Network("127.1.0.0/16")
"""Of pods: each has one of its own, so that all have their own ports, and the loopback has them all."""


@dataclass(frozen=True)
class Image:
    """What stands for the images of all containers."""

    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]
    folders: Mapping[str, Path]
    """By their paths in the image."""


class Kubelet:
    """Of the only node, on which it also puts pods. It asks the API server what there is again and again, and goes on
    with the pods that it knows while there is no answer."""

    def __init__(self, api: ApiServer, cluster: Cluster, image: Image, folder: Path) -> None:
        self.api = api
        self.cluster = cluster
        self.image = image
        self.folder = folder
        self.probes = httpx.Client(timeout=PROBE_DEADLINE_S, trust_env=False)
        self._addresses: Iterator[str] = map(str, ADDRESSES.hosts())
        self._pods: dict[str, _RunningPod] = {}
        """By uid."""
        self._stopping = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Kill what runs. Raises what the kubelet failed with."""
        self._stopping.set()
        self._thread.join(STOP_S)
        assert not self._thread.is_alive(), "the kubelet hangs"
        for pod in self._pods.values():
            pod.kill()
        self.probes.close()
        if self._failed is not None:
            raise self._failed

    def kill(self, name: str) -> None:
        """kill -9 of the process of a pod."""
        (pod,) = (pod for pod in tuple(self._pods.values()) if pod.name == name)
        pod.kill()

    def log(self, name: str) -> str:
        """All that pods of this name have printed."""
        return self.log_path(name).read_text(errors="replace")

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _work(self) -> None:
        try:
            while not self._stopping.wait(TURN_S):
                self._turn()
        except BaseException as error:
            self._failed = error
            raise

    def _turn(self) -> None:
        try:
            shown: dict[str, Manifest] = {
                each["metadata"]["uid"]: each for each in self.api.get("/api/v1/pods")["items"]
            }
        except UNANSWERED:
            shown = {uid: pod.manifest for uid, pod in self._pods.items()}
        for uid in self._pods.keys() - shown.keys():
            self._pods.pop(uid).kill()  # deleted by force
        for uid, manifest in shown.items():
            try:
                self._keep(uid, manifest)
            except UNANSWERED:
                continue  # the next turn sees what there is then

    def _keep(self, uid: str, manifest: Manifest) -> None:
        """Bring a pod a step closer to what its manifest says. Raises httpx.HTTPError, `Refused`."""
        metadata = manifest["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        is_leaving = "deletionTimestamp" in metadata
        pod = self._pods.get(uid)
        if pod is None and not is_leaving and "nodeName" not in manifest["spec"]:
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}, "target": target}
            self.api.call("POST", f"{path}/binding", binding)
            return
        if pod is None and not is_leaving and manifest.get("status", {}).get("phase") == "Pending":
            pod = self._pods[uid] = _RunningPod(self, manifest, next(self._addresses), self._environment(manifest))
        if pod is not None:
            pod.manifest = manifest
            if is_leaving:
                pod.end(metadata.get("deletionGracePeriodSeconds", 0))
            pod.step()
            if pod.status != pod.reported:
                self.api.call("PATCH", f"{path}/status", {"status": pod.status}, kind=MERGE_PATCH)
                pod.reported = pod.status
        if is_leaving and (pod is None or pod.is_over):
            precondition = {"uid": uid}
            self.api.call("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": precondition})

    def _environment(self, manifest: Manifest) -> dict[str, str]:
        """With a kubeconfig of the pod's own service account, where its token is mounted."""
        metadata, spec = manifest["metadata"], manifest["spec"]
        if not spec.get("automountServiceAccountToken", True):
            return dict(self.image.environment)
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{spec['serviceAccountName']}/token"
        token = self.api.call("POST", path, {"spec": {"expirationSeconds": 3600}})["status"]["token"]
        kubeconfig = self.folder / f"{metadata['name']}.kubeconfig"
        self.cluster.write_kubeconfig(kubeconfig, token, metadata["namespace"])
        return {**self.image.environment, "KUBECONFIG": str(kubeconfig)}


class _RunningPod:
    """One pod with one container, from its first start to its end."""

    def __init__(self, kubelet: Kubelet, manifest: Manifest, address: str, environment: Mapping[str, str]) -> None:
        self.manifest = manifest
        self.name: str = manifest["metadata"]["name"]
        self.reported: Manifest = {}
        """Status that the API server knows of."""
        self._address = address
        (self._container,) = manifest["spec"]["containers"]
        self._log = kubelet.log_path(self.name)
        self._image = kubelet.image
        self._probes = kubelet.probes
        self._environment = {**environment, **self._variables()}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = _now()
        self._state: Manifest = {"waiting": {"reason": "ContainerCreating"}}
        self._is_ready = False
        self._restarts = 0
        self._start_s = 0.0
        """When it is started next, unless it runs."""
        self._probe_s = 0.0
        self._kill_s: float | None = None
        """When its grace period ends."""

    @property
    def is_over(self) -> bool:
        """Whether its process has ended and there will be none again."""
        return "terminated" in self._state and (self._kill_s is not None or not self._comes_back)

    @property
    def status(self) -> Manifest:
        """As the API server is to show it."""
        phase = "Running"
        if self.is_over:
            phase = "Succeeded" if self._state["terminated"]["exitCode"] == 0 else "Failed"
        elif self._process is None and not self._restarts:
            phase = "Pending"
        conditions = {"PodScheduled": True, "Initialized": True, "ContainersReady": self._is_ready}
        conditions["Ready"] = self._is_ready
        container = {
            "name": self._container["name"],
            "image": self._container["image"],
            "imageID": "",
            "ready": self._is_ready,
            "restartCount": self._restarts,
            "state": self._state,
        }
        return {
            "phase": phase,
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "hostIP": "127.0.0.1",
            "startTime": self._started_at,
            "conditions": [{"type": name, "status": str(value)} for name, value in conditions.items()],
            "containerStatuses": [container],
        }

    def step(self) -> None:
        """Start it, look after it, or end it, as it is due."""
        if self._process is None:
            if not self.is_over and self._kill_s is None and time.monotonic() >= self._start_s:
                self._start()
            elif self._kill_s is not None and "terminated" not in self._state:
                self._state = {"terminated": {"exitCode": 137, "reason": "Error"}}
            return
        code = self._process.poll()
        if code is not None:
            self._ended(code)
        elif self._kill_s is not None and time.monotonic() > self._kill_s:
            self.kill()
        elif time.monotonic() > self._probe_s:
            self._probe_s = time.monotonic() + PROBE_S
            self._is_ready = self._kill_s is None and self._answers()

    def end(self, grace_s: float) -> None:
        """SIGTERM, once, and SIGKILL when its grace period is over."""
        if self._kill_s is None:
            self._kill_s = time.monotonic() + grace_s
            self._is_ready = False
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    @property
    def _comes_back(self) -> bool:
        policy = self.manifest["spec"].get("restartPolicy", "Always")
        failed = self._state.get("terminated", {}).get("exitCode", 1) != 0
        return policy == "Always" or (policy == "OnFailure" and failed)

    def _start(self) -> None:
        arguments = [self._here(self._expanded(each)) for each in self._container.get("args", ())]
        command = (*DIES_WITH_ITS_PARENT, *self._image.entrypoint, *arguments)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._state = {"running": {"startedAt": _now()}}

    def _ended(self, code: int) -> None:
        self._process = None
        self._is_ready = False
        ended: Manifest = {"exitCode": code if code >= 0 else 128 - code, "finishedAt": _now()}
        ended["reason"] = "Completed" if code == 0 else "Error"
        if code and self._container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            ended["message"] = self._log.read_text(errors="replace")[-SHOWN_OF_LOG:]
        self._state = {"terminated": ended}
        if self._comes_back and self._kill_s is None:
            self._restarts += 1
            self._start_s = time.monotonic() + RESTART_S

    def _answers(self) -> bool:
        """Its readiness probe."""
        probe = self._container.get("readinessProbe")
        if probe is None:
            return True
        asked = probe["httpGet"]
        ports = {each["name"]: each["containerPort"] for each in self._container.get("ports", ())}
        url = f"http://{self._address}:{ports.get(asked['port'], asked['port'])}{asked['path']}"
        try:
            return self._probes.get(url).is_success
        except httpx.HTTPError:
            return False

    def _variables(self) -> dict[str, str]:
        fields = {"metadata.name": self.name, "metadata.namespace": self.manifest["metadata"]["namespace"]}
        found: dict[str, str] = {}
        for each in self._container.get("env", ()):
            found[each["name"]] = each.get("value", "")
            if "valueFrom" in each:
                found[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        return found

    def _expanded(self, argument: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda named: self._environment.get(named[1], named[0]), argument)

    def _here(self, argument: str) -> str:
        """With this machine's folders and the pod's own address."""
        for inside, folder in self._image.folders.items():
            argument = re.sub(rf"(?<![\w/]){re.escape(inside)}(?=/|$)", str(folder), argument)
        return argument.replace("0.0.0.0", self._address)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
