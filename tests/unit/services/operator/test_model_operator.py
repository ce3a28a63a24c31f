"""A model of a mesh on a cluster: as many pods as are wanted, drained one by one, whoever fails meanwhile."""

import msgspec
import pytest

from controlplane.model.autoscale_record import ScaleRecord
from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planning.cascade.plan import encode_plan
from mesh.exit_status import ExitStatus
from services.operator.model_resource import FINALIZER
from tests.unit.services.cli.machine import ONE, TWO, planned
from tests.unit.services.operator.fake_api_server import MODELS, PODS
from tests.unit.services.operator.mesh_on_cluster import Mesh, model

pytestmark = [pytest.mark.live, pytest.mark.slow]


async def test_a_model_gets_its_pods_and_says_so(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 2))
    async with mesh.led():
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)
    pod, resource = mesh.server.get(PODS, "chat-1"), mesh.server.get(MODELS, "chat")
    assert pod["spec"]["containers"][0]["args"][-1] == "--member-id=chat-1"
    assert pod["spec"]["restartPolicy"] == "Never", "who ended why decides what comes next"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == resource["metadata"]["uid"]
    assert pod["metadata"]["labels"] == {"app": "mesh", "penstock.io/penstockmodel": "chat"}
    assert resource["metadata"]["finalizers"] == [FINALIZER]
    assert resource["status"] | {"conditions": []} == {
        "observedGeneration": 1,
        "replicas": 2,
        "readyReplicas": 2,
        "selector": "penstock.io/penstockmodel=chat",
        "conditions": [],
    }


async def test_scale_in_drains_the_chosen_pod_and_no_other(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 3))
    async with mesh.led():
        await mesh.has("chat-0", "chat-1", "chat-2")
        await mesh.is_ready("chat", 3)
        before = {name: mesh.server.get(PODS, name) for name in ("chat-0", "chat-2")}
        mesh.server.calls.clear()
        scale = ScaleRecord("chat", 2, leave_first=("chat-1",), why="little to do")
        await mesh.store.put(scale.key, msgspec.json.encode(scale))
        await mesh.server.until(lambda: mesh.server.living_pods() == {"chat-0", "chat-2"})
        leaving = mesh.server.get(PODS, "chat-1")["metadata"]
        assert leaving["deletionGracePeriodSeconds"] == 30, "its own: it drains"
        await mesh.server.until(lambda: mesh.ready("chat").get("reason") == "Draining")
        mesh.ends("chat-1", ExitStatus.STOPPED)
        await mesh.is_ready("chat", 2)
    assert {name: mesh.server.get(PODS, name) for name in before} == before
    assert [path for method, path in mesh.server.calls if method == "DELETE"] == ["pods/chat-1"]


async def test_the_scale_subresource_is_followed(mesh: Mesh) -> None:
    """As HPA, KEDA and `kubectl scale` use it."""
    mesh.server.apply(model("chat", 1))
    async with mesh.led():
        await mesh.has("chat-0")
        scale = mesh.server._scale_of("chat")
        mesh.server._scale("chat", {**scale, "metadata": {"name": "chat"}, "spec": {"replicas": 2}})
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)
    assert mesh.server._scale_of("chat")["status"] == {"replicas": 2, "selector": "penstock.io/penstockmodel=chat"}


async def test_a_plan_is_followed_in_its_shapes(mesh: Mesh) -> None:
    mesh.server.apply(model("small", 1))
    mesh.server.apply(model("large", 1))
    plan = planned("both", small={ONE: 1}, large={TWO: 1})
    cascade = CascadeRecord("both", ("small", "large"), plan.thresholds, plan_revision=7)
    async with mesh.led():
        await mesh.has("small-0", "large-0")
        await mesh.is_ready("large", 1)
        await mesh.store.put(PLANS_PREFIX + "both", encode_plan(plan))
        await mesh.store.put(cascade.key, msgspec.json.encode(cascade))
        await mesh.has("small-0", "large-0", "large-1")
        await mesh.has("small-0", "large-1")
        mesh.ends("large-0", ExitStatus.STOPPED)
        await mesh.is_ready("large", 1)
    wide = mesh.server.get(PODS, "large-1")["spec"]["containers"][0]
    assert wide["args"][-2:] == ["--engine-arg=tensor_parallel_size=2", "--member-id=large-1"]
    assert wide["resources"]["limits"]["nvidia.com/gpu"] == "2"


async def test_a_pod_that_dies_is_started_again_and_its_log_kept_until_then(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 1))
    async with mesh.led():
        await mesh.has("chat-0")
        await mesh.is_ready("chat", 1)
        former = mesh.server.get(PODS, "chat-0")["metadata"]["uid"]
        mesh.ends("chat-0", 137)
        assert mesh.server.get(PODS, "chat-0")["status"]["phase"] == "Failed"
        await mesh.server.until(
            lambda: "chat-0" in mesh.server.names(PODS) and mesh.server.get(PODS, "chat-0")["metadata"]["uid"] != former
        )
        await mesh.has("chat-0")
        await mesh.is_ready("chat", 1)


async def test_a_pod_that_was_drained_by_hand_stays_away(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 2))
    async with mesh.led():
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)
        mesh.ends("chat-1", ExitStatus.DRAINED)
        await mesh.server.until(lambda: "an operator has drained it" in mesh.ready("chat").get("message", ""))
        await mesh.server.until(lambda: mesh.server.names(PODS) == {"chat-0"})
        mesh.server.apply(model("chat", 3))
        await mesh.has("chat-0", "chat-1", "chat-2")


async def test_wrong_settings_are_told_and_not_tried_for_ever(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 1))
    async with mesh.led():
        await mesh.server.until(lambda: mesh.server.living_pods() == {"chat-0"})
        mesh.server.ends("chat-0", ExitStatus.WRONG_SETTINGS, "Error: no model at /models/chat")
        await mesh.server.until(lambda: "no model at /models/chat" in mesh.ready("chat").get("message", ""))
        assert "kubectl logs -n mesh chat-0" in mesh.ready("chat")["message"]


async def test_what_keeps_a_pod_from_starting_is_told(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 1))
    async with mesh.led():
        await mesh.server.until(lambda: mesh.server.living_pods() == {"chat-0"})
        mesh.server.cannot_be_scheduled("chat-0", "0/3 nodes are available: insufficient nvidia.com/gpu")
        await mesh.server.until(lambda: "0/3 nodes are available" in mesh.ready("chat").get("message", ""))
    assert mesh.ready("chat")["status"] == "False"


async def test_a_model_that_is_deleted_goes_when_its_instances_have_drained(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 2))
    async with mesh.led():
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)
        mesh.server.delete(MODELS, "chat")
        await mesh.server.until(lambda: not mesh.server.living_pods())
        assert mesh.server.names(MODELS) == {"chat"}, "it waits for them"
        mesh.ends("chat-0", ExitStatus.STOPPED)
        mesh.ends("chat-1", ExitStatus.STOPPED)
        await mesh.server.until(lambda: not mesh.server.names(MODELS))
        mesh.server.apply(model("chat", 1))
        await mesh.has("chat-0")


async def test_the_next_leader_takes_over_what_it_finds(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 2))
    async with mesh.led():
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)
    mesh.ends("chat-0", 1)
    living = mesh.server.get(PODS, "chat-1")
    mesh.server.calls.clear()
    async with mesh.led():
        await mesh.server.until(lambda: ("POST", "pods") in mesh.server.calls)
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)
    assert mesh.server.get(PODS, "chat-1") == living
    assert [call for call in mesh.server.calls if call[1].startswith("pods")] == [
        ("DELETE", "pods/chat-0"),
        ("POST", "pods"),
    ]


async def test_an_answer_that_is_lost_starts_nothing_twice(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 1))
    async with mesh.led():
        await mesh.has("chat-0")
        await mesh.is_ready("chat", 1)
        uid = mesh.server.get(PODS, "chat-0")["metadata"]["uid"]
        mesh.workers.leave("chat-0")
        mesh.server.ends("chat-0", 1)
        mesh.server.lose_answers = 2  # of the deletion, or of the creation
        await mesh.server.until(
            lambda: (
                mesh.server.living_pods() == {"chat-0"} and mesh.server.get(PODS, "chat-0")["metadata"]["uid"] != uid
            )
        )
        await mesh.has("chat-0")
        await mesh.is_ready("chat", 1)


async def test_watches_that_break_off_are_begun_anew(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 1))
    async with mesh.led():
        await mesh.has("chat-0")
        mesh.server.cut_watches(forget=True)
        mesh.server.apply(model("chat", 2))
        mesh.server.cut_watches()
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)


async def test_who_writes_at_the_same_time_loses_nothing(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 1))
    mesh.server.before_patch = lambda: mesh.server.apply(model("chat", 2))
    async with mesh.led():
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)
    assert mesh.server.get(MODELS, "chat")["metadata"]["finalizers"] == [FINALIZER]


async def test_two_resources_of_one_model_are_refused(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 1))
    mesh.server.apply(model("other", 1, model="chat"))
    async with mesh.led():
        await mesh.has("chat-0")
        await mesh.server.until(lambda: mesh.ready("other").get("reason") == "Refused")
    assert mesh.ready("other")["message"] == "chat runs the model chat already: name another in spec.model"


async def test_there_are_no_more_pods_than_allowed(mesh: Mesh) -> None:
    mesh.server.apply(model("chat", 9))
    async with mesh.led():
        await mesh.has(*(f"chat-{number}" for number in range(8)))
        await mesh.server.until(lambda: "there are 8 here" in mesh.ready("chat").get("message", ""))
