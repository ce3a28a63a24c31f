"""A request for a LoRA adapter goes where the adapter is, unless that is much busier than where it is not."""

from dataclasses import replace

import msgspec
import pytest

from controlplane.model.adapter import AdapterLoad
from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstancePhase, LoadReport
from controlplane.model.placement import Placement
from controlplane.policies import adapters
from controlplane.policies.place import choose_decode, place
from controlplane.policies.registry import create_policy
from mesh.errors import NoInstance
from tests.unit.controlplane.builders import instance, report, request

DIGEST = "d"


def fleet(max_loras: int = 2, **loads: LoadReport) -> ClusterTable:
    """Instances by name; one whose name begins with `plain` serves no adapters."""
    table = ClusterTable()
    for name, load in loads.items():
        table.joined(replace(instance(name), max_loras=0 if name.startswith("plain") else max_loras))
        report(table, name, load)
    return table


def load(requests: int = 0, used: str = "", idle: str = "", refused: str = "") -> LoadReport:
    return LoadReport(running_requests=requests, adapters=AdapterLoad(tuple(used), tuple(idle), tuple(refused)))


def placed(table: ClusterTable, policy: str = "least_loaded", digest: str = DIGEST) -> Placement:
    return place(table, create_policy(policy), msgspec.structs.replace(request(), adapter_digest=digest))


@pytest.mark.parametrize("policy", ["least_loaded", "lmetric", "round_robin"])
def test_where_it_is_loaded(policy: str) -> None:
    table = fleet(a=load(), b=load(3, idle="d"), plain=load())
    placement = placed(table, policy)
    assert placement.instance.instance_id == "b"
    assert placement.excluded == {"a": adapters.NOT_LOADED, "plain": adapters.NO_ADAPTERS}
    assert placed(table, policy, digest="").instance.instance_id != "b", "others go by the policy"


def test_where_it_is_not_once_that_is_much_less_busy() -> None:
    table = fleet(a=load(1), b=load(4, used="d"), c=load(0))
    placement = placed(table)
    assert placement.instance.instance_id == "c"
    assert placement.excluded == {"a": adapters.NOT_LOADED}
    assert placed(fleet(a=load(1), b=load(3, used="d"))).instance.instance_id == "b"


def test_not_where_its_requests_would_wait_for_those_of_other_adapters() -> None:
    table = fleet(a=load(9, used="d"), b=load(1, used="xy", idle="d"), c=load(7))
    placement = placed(table)
    assert placement.instance.instance_id == "a"
    assert placement.excluded == {"b": adapters.BUSY, "c": adapters.NOT_LOADED}
    assert placed(fleet(b=load(1, used="xy"), c=load(7))).instance.instance_id == "c"
    assert placed(fleet(b=load(1, used="xy"), c=load(7, used="vw"))).instance.instance_id == "b", "it waits somewhere"


def test_never_where_it_cannot_be_served() -> None:
    table = fleet(a=load(refused="d"), plain=load())
    with pytest.raises(NoInstance, match=r"a could not load the LoRA adapter .*plain serves no LoRA adapters"):
        placed(table)
    assert placed(table, digest="other").instance.instance_id == "a"


def test_it_is_decoded_where_adapters_are_served() -> None:
    table = ClusterTable()
    for name, phase, max_loras in (
        ("a", InstancePhase.PREFILL, 1),
        ("b", InstancePhase.DECODE, 0),
        ("c", InstancePhase.DECODE, 1),
    ):
        table.joined(replace(instance(name, phase=phase), max_loras=max_loras))
        report(table, name, load(5 if name == "c" else 0))
    placement = placed(table)
    assert (placement.instance.instance_id, placement.decode_instance.instance_id) == ("a", "c")
    asked = msgspec.structs.replace(request("r2"), adapter_digest=DIGEST)
    chosen = choose_decode(table, create_policy("least_loaded"), asked, "a")
    assert chosen is not None
    assert chosen[0][chosen[1].row].instance_id == "c"
