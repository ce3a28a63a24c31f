"""Who decodes under penstock once a prompt is computed."""

from msgspec.structs import replace

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstancePhase, InstanceState, LoadReport
from controlplane.model.placement import PlacementRequest
from controlplane.model.step_costs import DATASHEET_COSTS
from controlplane.policies.penstock import Penstock
from controlplane.policies.phases import STAYS
from controlplane.policies.place import choose_decode, place
from tests.unit.controlplane.builders import cache, cluster, instance, report, request

PROMPT_TOKENS = 2000


def profiled(*instance_ids: str) -> ClusterTable:
    table = cluster(*instance_ids)
    for instance_id in instance_ids:
        table.costed(instance_id, "1", DATASHEET_COSTS)
    return table


def asked(number: int, now_s: float, blocks: tuple[int, ...] = ()) -> PlacementRequest:
    return replace(request(f"r{number}", PROMPT_TOKENS, blocks, now_s=now_s), max_tokens=100)


def flood(table: ClusterTable, policy: Penstock, instance_id: str, blocks: tuple[int, ...] = ()) -> list[bool]:
    """Twenty prompts a half second apart, all of which have to go there; whether who decodes was left open."""
    opens = []
    for number in range(20):
        others = frozenset(each.instance_id for each in table.instances()) - {instance_id}
        wanted = replace(asked(number, number / 2, blocks), excluded_instance_ids=others)
        opens.append(place(table, policy, wanted, asks_later=True).is_decode_open)
        table.ended(wanted.request_id)
    return opens


def decoded_by(table: ClusterTable, policy: Penstock, prefill_id: str, now_s: float = 10.0) -> str:
    chosen = choose_decode(table, policy, asked(99, now_s), prefill_id)
    assert chosen is not None
    instances, choice = chosen
    table.ended("r99")
    return instances[choice.row].instance_id


def test_a_request_is_decoded_where_few_prompts_come() -> None:
    table, policy = profiled("a", "b"), Penstock()
    opens = flood(table, policy, "a")
    assert not opens[0], "nothing has come there before"
    assert opens[-1]
    assert decoded_by(table, policy, "a") == "b"
    assert decoded_by(table, policy, "b") == "b"
    assert decoded_by(table, policy, "a", now_s=100.0) == "b"


def test_where_as_many_prompts_come_everywhere_it_stays() -> None:
    table, policy = profiled("a", "b"), Penstock()
    flood(table, policy, "a")
    flood(table, policy, "b")
    assert decoded_by(table, policy, "a") == "a"


def test_prompts_are_forgotten() -> None:
    table, policy = profiled("a", "b"), Penstock()
    flood(table, policy, "a")
    report(table, "a", LoadReport())
    quiet = place(table, policy, asked(50, 1000.0), asks_later=True)
    assert not quiet.is_decode_open


def test_it_stays_where_the_others_are_full() -> None:
    table, policy = profiled("a", "b"), Penstock()
    flood(table, policy, "a")
    report(table, "b", LoadReport(running_requests=60, running_tokens=16_000))
    assert decoded_by(table, policy, "a") == "a"


def test_nothing_is_moved_that_displaces_what_is_used_again() -> None:
    chain = tuple(range(1, PROMPT_TOKENS // 16 + 1))
    table, policy = profiled("a", "b"), Penstock()
    cache(table, "a", *chain[:100])
    flood(table, policy, "a", chain)
    assert decoded_by(table, policy, "a") == "a"


def test_without_measured_costs_nobody_is_asked() -> None:
    table, policy = cluster("a", "b"), Penstock()
    table.costed("a", "1", DATASHEET_COSTS)
    assert not any(flood(table, policy, "a"))
    assert decoded_by(table, policy, "a") == "a"
    chosen = choose_decode(table, policy, asked(99, 10.0), "a")
    assert chosen is not None
    assert chosen[1].rule == STAYS


def test_the_operators_phases_stand() -> None:
    table, policy = profiled("a", "b"), Penstock()
    table.joined(instance("c", phase=InstancePhase.DECODE))
    table.reported("c", "1", LoadReport(), InstanceState.READY)
    table.costed("c", "1", DATASHEET_COSTS)
    assert not any(flood(table, policy, "a"))
    placement = place(table, policy, asked(50, 11.0), asks_later=True)
    assert placement.decode is not None


def test_shares_follow_the_instances() -> None:
    table, policy = profiled("a", "b", "c"), Penstock()
    flood(table, policy, "b")
    table.lost("a", "1")
    assert decoded_by(table, policy, "b") == "c"
    table.joined(instance("a", "2"))
    table.reported("a", "2", LoadReport(), InstanceState.READY)
    table.costed("a", "2", DATASHEET_COSTS)
    assert decoded_by(table, policy, "b") in ("a", "c")


def test_an_instance_that_nothing_can_be_moved_from_keeps_its_requests() -> None:
    table, policy = profiled("a", "b"), Penstock()
    flood(table, policy, "a")
    report(table, "a", LoadReport(transfer_obstacle="its agent is gone"))
    assert decoded_by(table, policy, "a") == "a"
