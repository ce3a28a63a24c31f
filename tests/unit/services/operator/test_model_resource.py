"""Pods of a `PenstockModel`, as users and clusters write things."""

from typing import Any

import pytest

from services.operator.model_resource import ModelResource, by_model
from services.operator.pod import Pod


def resource(name: str = "chat", *, leaving: bool = False, **spec: Any) -> ModelResource:
    metadata = {"name": name, "uid": "u", "resourceVersion": "1", "generation": 1}
    if leaving:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    container = {
        "name": "worker",
        "args": [
            "serve",
            "worker",
            "--engine-arg",
            "tensor_parallel_size=2",
            "--engine-arg=block_size=16",
            "--hang-s=9",
        ],
        "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "8Gi"}},
    }
    template = {"spec": {"containers": [{"name": "proxy"}, container]}}
    return ModelResource.read({"metadata": metadata, "spec": {"replicas": 1, "template": template, **spec}})


def test_another_shape_changes_the_engine_and_the_gpus() -> None:
    chat = resource(model="Org/Chat")
    assert chat.shape == (2, 1)
    as_written, wide = chat.pod("Org--Chat-7", (2, 1)), chat.pod("Org--Chat-8", (2, 2))
    assert as_written["metadata"]["name"] == "chat-7"
    proxy, worker = as_written["spec"]["containers"]
    assert proxy == {"name": "proxy"}
    assert worker["args"][2:5] == ["--engine-arg", "tensor_parallel_size=2", "--engine-arg=block_size=16"]
    assert worker["args"][-1] == "--member-id=Org--Chat-7"
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": "8Gi"}
    worker = wide["spec"]["containers"][1]
    assert worker["args"] == [
        *("serve", "worker", "--hang-s=9", "--engine-arg=block_size=16", "--engine-arg=tensor_parallel_size=2"),
        *("--engine-arg=pipeline_parallel_size=2", "--member-id=Org--Chat-8"),
    ]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "4", "memory": "8Gi"}
    assert chat.template["spec"]["containers"][1]["resources"]["limits"]["nvidia.com/gpu"] == 2, "left as it was"


def test_a_pod_reads_back_what_it_was_made_for() -> None:
    made = resource(model="Org/Chat").pod("Org--Chat-7", (2, 2))
    made["metadata"] |= {"uid": "p", "resourceVersion": "2"}
    read = Pod.read(made)
    assert read is not None
    assert (read.name, read.resource, read.instance, read.shape) == ("chat-7", "chat", "Org--Chat-7", (2, 2))
    assert not read.has_ended
    for odd in ("2x", "x2", "wide", ""):
        made["metadata"]["annotations"]["penstock.io/shape"] = odd
        assert Pod.read(made) is None


@pytest.mark.parametrize(
    ("status", "exit_status", "reason"),
    [
        ({"phase": "Running"}, None, ""),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, 1, "low on memory"),
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
                ],
            },
            137,
            "OOMKilled",
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [
                    {"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
                ],
            },
            None,
            "ImagePullBackOff: no such image",
        ),
    ],
)
def test_how_a_pod_ends_and_what_holds_it_up(status: dict[str, Any], exit_status: int | None, reason: str) -> None:
    made = resource().pod("chat-0", (2, 1))
    made["metadata"] |= {"uid": "p", "resourceVersion": "2"}
    read = Pod.read({**made, "status": status})
    assert read is not None
    assert (read.exit_status, read.reason) == (exit_status, reason)


def test_what_no_pod_can_be_made_of_is_refused_in_words() -> None:
    running, refused = by_model([resource("a", template={}), resource("b" * 59), resource("c", replicas=9999)])
    assert not running
    assert refused["a"].startswith("spec.template.spec.containers is empty")
    assert refused["b" * 59] == "metadata.name has 59 characters; 58 are possible"
    assert refused["c"].startswith("spec.replicas 9999")


def test_a_model_is_run_by_another_resource_only_when_the_former_is_gone() -> None:
    former, other = resource("z", model="m", leaving=True), resource("a", model="m")
    assert by_model([former, other]) == ({}, {"a": "z runs the model m already: name another in spec.model"})
    assert by_model([other]) == ({"m": other}, {})
