"""The operator on a real API server: its pods are processes with simulated engines, and streams notice nothing."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.in_time import eventually
from tests.kubernetes.api_server import TABLE, ApiServer, Manifest, Refused
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import ROOT
from tests.kubernetes.installed_mesh import MODEL, MODELS, NAMESPACE, PODS, RELEASE, RESOURCE, InstalledMesh
from tests.kubernetes.kubelet import Image, Kubelet
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import PENSTOCK
from tests.mesh.store.etcd_process import EtcdProcess

STREAMS = 8
TOKENS = 800
SCALED_S = 120.0
STREAMS_S = 60.0

Disturb = Callable[[Sequence[Reader]], None]


@pytest.fixture(scope="module")
def mesh(
    api: ApiServer, cluster: Cluster, etcd: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InstalledMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    image = Image(PENSTOCK, environment, {"/models": ROOT / "demo/models", "/predictors": ROOT / "demo/predictors"})
    store, kubelet = EtcdProcess(etcd, folder), Kubelet(api, cluster, image, folder)
    store.start()
    kubelet.start()
    try:
        installed = InstalledMesh(api, cluster, kubelet, f"etcd://{store.endpoint}", folder)
        installed.install()
        installed.wait_until_serving(2)
        yield installed
    finally:
        kubelet.stop()
        store.kill()


@pytest.fixture(scope="module")
def expected(mesh: InstalledMesh) -> list[str]:
    """What undisturbed streams say."""
    return under_streams(mesh, lambda _streams: None)


def under_streams(mesh: InstalledMesh, disturb: Disturb) -> list[str]:
    """The texts of streams that all ran when something was done to the mesh."""
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = list(pool.map(lambda number: Reader(mesh, f"story number {number}", TOKENS), range(STREAMS)))
    eventually(lambda: all(stream.text for stream in streams), STREAMS_S, "all streams have begun")
    disturb(streams)
    return [stream.whole_text() for stream in streams]


def uids(pods: dict[str, Manifest]) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in pods.items()}


def seconds_until(condition: Callable[[], object], what: str) -> float:
    began_s = time.monotonic()
    eventually(condition, SCALED_S, what)
    return time.monotonic() - began_s


def test_it_comes_up_with_exactly_the_pods_that_are_wanted(mesh: InstalledMesh) -> None:
    assert set(mesh.workers()) == {f"{RESOURCE}-0", f"{RESOURCE}-1"}
    assert Reader(mesh, "once upon a time", 50).whole_text()
    printed = mesh.api.call("GET", MODELS, accept=TABLE)
    (row,) = printed["rows"]
    shown = dict(zip((each["name"] for each in printed["columnDefinitions"]), row["cells"], strict=True))
    assert shown.pop("Age")
    assert shown == {"Name": RESOURCE, "Model": MODEL, "Wanted": 2, "Pods": 2, "Ready": 2, "Reason": "AsWanted"}
    scale = mesh.api.get(f"{MODELS}/{RESOURCE}/scale")
    assert scale["status"] == {"replicas": 2, "selector": f"penstock.io/penstockmodel={RESOURCE}"}
    assert set(mesh.workers()) == {pod["metadata"]["name"] for pod in mesh.pods(scale["status"]["selector"])}


def test_the_operator_may_do_what_it_does_and_no_more(mesh: InstalledMesh, cluster: Cluster) -> None:
    """It runs with its own account: what its Role lacks would have failed the other tests."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{RELEASE}-operator/token"
    token = mesh.api.call("POST", path, {"spec": {}})["status"]["token"]
    operator = ApiServer(cluster.url, token, cluster.authority)
    elsewhere = PODS.replace(NAMESPACE, "default")
    try:
        assert len(operator.get(PODS)["items"]) == len(mesh.pods())
        for method, denied in (
            ("GET", elsewhere),
            ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
            ("GET", f"{PODS}/{RESOURCE}-0"),
            ("POST", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"),
            ("DELETE", f"{MODELS}/{RESOURCE}"),
            ("DELETE", PODS),
        ):
            with pytest.raises(Refused, match=r"^403"):
                operator.call(method, denied, {} if method == "POST" else None)
    finally:
        operator.close()


def test_scale_out_and_in_costs_no_token_and_takes_the_chosen_pod(
    mesh: InstalledMesh, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    took: dict[str, float] = {}

    def out(_streams: Sequence[Reader]) -> None:
        mesh.scale(3)
        took["out"] = seconds_until(lambda: mesh.is_as_wanted(3), f"three instances serve: {mesh.story()}")

    assert under_streams(mesh, out) == expected
    before = uids(mesh.workers())

    def in_by_choice(streams: Sequence[Reader]) -> None:
        assert sum(stream.instance == f"{MODEL}-0" for stream in streams) > 1, "it is busy"
        mesh.choose(2, f"{MODEL}-0")
        gone = lambda: set(mesh.workers()) == {f"{RESOURCE}-1", f"{RESOURCE}-2"}  # noqa: E731
        took["in"] = seconds_until(gone, f"the chosen pod is gone: {mesh.story()}")
        assert all(stream.reads for stream in streams), "its requests have moved: none had to end before"
        (moved,) = (line for line in mesh.kubelet.log(f"{RESOURCE}-0").splitlines() if "moved the running" in line)
        took["moved"] = json.loads(moved)["moved"]
        assert took["moved"] > 0

    try:
        assert under_streams(mesh, in_by_choice) == expected
    finally:
        mesh.scale(2)
        mesh.forget_choice()
    eventually(lambda: mesh.is_as_wanted(2), SCALED_S, mesh.story)
    left = uids(mesh.workers())
    assert left == {name: before[name] for name in left}, "no other pod was touched"
    with capsys.disabled():
        seconds = f"scale-out {took['out']:.1f} s, scale-in of a busy worker {took['in']:.1f} s"
        print(f"\nunder {STREAMS} streams: {seconds}, {took['moved']:g} of its requests moved")


def test_a_killed_pod_is_replaced_and_no_stream_is_lost(mesh: InstalledMesh, expected: list[str]) -> None:
    victim = min(mesh.workers())
    former = uids(mesh.workers())[victim]

    def kill(_streams: Sequence[Reader]) -> None:
        mesh.kubelet.kill(victim)
        eventually(lambda: uids(mesh.workers()).get(victim, former) != former, SCALED_S, "another pod comes")

    assert under_streams(mesh, kill) == expected
    eventually(lambda: mesh.is_as_wanted(2), SCALED_S, mesh.story)


def test_an_evicted_pod_drains_and_another_comes(mesh: InstalledMesh, expected: list[str]) -> None:
    """As `kubectl drain NODE` does it, within the budget that the chart sets: one at a time."""
    budget = f"/apis/policy/v1beta1/namespaces/{NAMESPACE}/poddisruptionbudgets/{RESOURCE}"
    eventually(lambda: mesh.api.get(budget).get("status", {}).get("disruptionsAllowed"), SCALED_S, "one may go")
    first, second = sorted(mesh.workers())
    former = uids(mesh.workers())

    def evict(name: str) -> None:
        eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
        mesh.api.call("POST", f"{PODS}/{name}/eviction", eviction)

    def evict_one(_streams: Sequence[Reader]) -> None:
        evict(first)
        with pytest.raises(Refused, match=r"^429"):
            evict(second)
        eventually(lambda: uids(mesh.workers()).get(first, former[first]) != former[first], SCALED_S, "another comes")

    assert under_streams(mesh, evict_one) == expected
    eventually(lambda: mesh.is_as_wanted(2), SCALED_S, mesh.story)
    assert uids(mesh.workers())[second] == former[second]


def test_a_second_operator_carries_on_when_the_leader_is_killed(mesh: InstalledMesh) -> None:
    before, leader = uids(mesh.workers()), mesh.leader()
    assert leader.startswith(f"{RELEASE}-operator-")
    mesh.kubelet.kill(leader)
    mesh.scale(3)
    eventually(lambda: mesh.is_as_wanted(3), SCALED_S, mesh.story)
    after = uids(mesh.workers())
    assert {name: after[name] for name in before} == before, "it has taken over what was there"
    assert mesh.leader() not in ("", leader)
    mesh.scale(2)
    eventually(lambda: mesh.is_as_wanted(2), SCALED_S, mesh.story)


def test_streams_outlive_the_api_server_and_its_etcd(
    mesh: InstalledMesh, cluster: Cluster, expected: list[str]
) -> None:
    victim = max(mesh.workers())
    former = uids(mesh.workers())[victim]

    def away(streams: Sequence[Reader]) -> None:
        cluster.kill_server()
        cluster.kill_store()
        mesh.kubelet.kill(victim)
        read = [len(stream.text) for stream in streams]
        longer = lambda: all(  # noqa: E731
            len(stream.text) > before or not stream.reads for stream, before in zip(streams, read, strict=True)
        )
        eventually(longer, STREAMS_S, "streams go on, those of the killed worker, too")
        cluster.start_store()
        cluster.start_server()

    assert under_streams(mesh, away) == expected
    eventually(lambda: uids(mesh.workers()).get(victim, former) != former, SCALED_S, "another pod comes")
    eventually(lambda: mesh.is_as_wanted(2), SCALED_S, mesh.story)
    mesh.scale(3)
    eventually(lambda: mesh.is_as_wanted(3), SCALED_S, mesh.story)
    mesh.scale(2)
    eventually(lambda: mesh.is_as_wanted(2), SCALED_S, mesh.story)


def test_an_image_is_rolled_and_no_stream_is_lost(mesh: InstalledMesh, expected: list[str]) -> None:
    before = uids(mesh.workers())
    mesh.install(images={"workerCpu": "penstock/worker-cpu:next"})
    eventually(lambda: mesh.is_as_wanted(2), SCALED_S, mesh.story)
    assert uids(mesh.workers()) == before, "pods keep their image until they are started anew"

    def roll(_streams: Sequence[Reader]) -> None:
        mesh.penstock("restart", "--rolling", "--role", "worker")

    assert under_streams(mesh, roll) == expected
    eventually(lambda: mesh.is_as_wanted(2), SCALED_S, mesh.story)
    images = {pod["spec"]["containers"][0]["image"] for pod in mesh.workers().values()}
    assert images == {"penstock/worker-cpu:next"}


def test_a_deleted_model_goes_when_its_streams_have_ended(mesh: InstalledMesh, expected: list[str]) -> None:
    def delete(streams: Sequence[Reader]) -> None:
        mesh.api.call("DELETE", f"{MODELS}/{RESOURCE}")
        assert "deletionTimestamp" in mesh.model()["metadata"], "it waits for its instances"
        assert all(stream.reads for stream in streams)

    assert under_streams(mesh, delete) == expected
    eventually(lambda: not mesh.api.get(MODELS)["items"], SCALED_S, "the model is gone")
    assert not mesh.workers()
