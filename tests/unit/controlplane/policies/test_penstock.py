"""The milliseconds that a placement adds, worked out by hand."""

import numpy as np
import pytest
from msgspec.structs import replace

from controlplane.model.cluster import ClusterTable
from controlplane.model.expected_blocks import marks_of
from controlplane.model.instance import KvBlocks, KvTier, LoadReport
from controlplane.model.kv_costs import KvCosts
from controlplane.model.placement import Decision
from controlplane.model.step_costs import StepCosts
from controlplane.policies.least_loaded import LeastLoaded
from controlplane.policies.penstock import Penstock
from controlplane.policies.place import place
from tests.unit.controlplane.builders import cache, cluster, report, request
from tests.unit.controlplane.policies.problems import CHAIN, LONG, asked

COSTS = StepCosts(
    fixed_ms=10.0, prefill_token_ms=0.1, decode_request_ms=1.0, context_token_ms=0.001, attended_pair_ms=0.0
)
ANSWER_TOKENS = 256.0
"""The first guess."""


def costed(*instance_ids: str, costs: StepCosts = COSTS) -> ClusterTable:
    table = cluster(*instance_ids)
    for instance_id in instance_ids:
        table.costed(instance_id, "1", costs)
    return table


def decide(table: ClusterTable, prompt_tokens: int = 96, max_tokens: int = 0) -> Decision:
    return Penstock().decide(
        asked(table, replace(request(prompt_tokens=prompt_tokens, blocks=CHAIN), max_tokens=max_tokens))
    )


def test_an_idle_instance_costs_the_request_its_own_time() -> None:
    table = costed("a", "b")
    cache(table, "b", *CHAIN[:3])
    decision = decide(table)
    token_ms = 0.1 + 10 / 2048
    answer_ms = ANSWER_TOKENS * (10 + 1 + 0.001 * 96)
    assert decision.scores.tolist() == pytest.approx([96 * token_ms + answer_ms, 48 * token_ms + answer_ms])
    assert decision.row == 1


def test_others_pay_for_its_prompt_and_for_its_context() -> None:
    table = costed("a")
    report(table, "a", LoadReport(running_requests=4, running_tokens=1000))
    parts = decide(table).indicators
    beside_ms = 10 + 4 * 1 + 0.001 * 1000
    assert parts["wait_ms"].tolist() == [0]
    assert parts["prefill_ms"].tolist() == [int(96 * (0.1 + beside_ms / 2044))]
    assert parts["others_ms"].tolist() == pytest.approx([4 * (96 * (0.1 + 10 / 2048) + 258 * 1.096)], rel=0.02)


def test_who_waits_there_is_waited_for() -> None:
    table = costed("a", "b")
    report(table, "a", LoadReport(queued_requests=1, queued_prefill_tokens=20_000))
    decision = decide(table)
    assert decision.row == 1
    assert decision.indicators["wait_ms"].tolist() == [int(20_000 * (0.1 + 10 / 2048)), 0]


def test_a_busy_holder_loses_its_request_once_that_costs_more_than_the_prefix() -> None:
    """The prefix is worth some 9 s of prefill; beyond a batch that waits or slows down for longer it goes elsewhere."""
    chosen = []
    for batch in (0, 4, 40):
        table = costed("holder", "idle")
        cache(table, "holder", *CHAIN)
        report(table, "holder", LoadReport(running_requests=batch, running_tokens=100 * batch))
        chosen.append(decide(table, prompt_tokens=100).row)
    assert chosen == [0, 1, 1]


def test_the_faster_of_two_kinds_of_instances_is_preferred_until_it_is_full() -> None:
    table = costed("fast", "slow")
    table.costed("slow", "1", replace(COSTS, fixed_ms=40.0, prefill_token_ms=0.4))
    assert decide(table).row == 0
    report(table, "fast", LoadReport(running_requests=100, running_tokens=10_000))
    assert decide(table).row == 1


def test_nothing_is_decoded_of_an_answer_of_one_token() -> None:
    assert decide(costed("a"), max_tokens=1).indicators["decode_ms"].tolist() == [0]


def test_what_does_not_fit_is_computed_again() -> None:
    parts = {}
    for running_tokens in (12_000, 16_000):
        table = costed("a")
        report(table, "a", LoadReport(running_requests=1, running_tokens=running_tokens))
        parts[running_tokens] = int(decide(table, prompt_tokens=4000).indicators["others_ms"][0])
    assert parts[16_000] - parts[12_000] == pytest.approx(4000 * 0.1 * 2, abs=2), "of both, by what is over"


def test_ties_rotate() -> None:
    table, policy = costed("a", "b"), Penstock()
    rows = [policy.decide(asked(table, request(str(number), prompt_tokens=50))).row for number in range(4)]
    assert sorted(rows) == [0, 0, 1, 1]
    assert np.isfinite(decide(table).scores).all()


PULLS = KvCosts(pull_fixed_ms=2.0, pull_token_ms=0.01, load_fixed_ms=1.0, load_token_ms=0.005)


def with_kv(*instance_ids: str, costs: KvCosts = PULLS) -> ClusterTable:
    table = costed(*instance_ids)
    for instance_id in instance_ids:
        table.kv_costed(instance_id, "1", costs)
    return table


def long_prompt(table: ClusterTable, policy: Penstock | None = None, now_s: float = 0.0) -> Decision:
    wanted = replace(request(prompt_tokens=1024, blocks=LONG), now_s=now_s)
    found = asked(table, wanted)
    held = table.held_tokens(found.snapshot, LONG)
    return (policy or Penstock()).decide(replace(found, held_tokens=held))


def test_a_prefix_is_pulled_where_the_one_that_has_it_is_busy() -> None:
    table = with_kv("busy", "idle")
    cache(table, "busy", *LONG)
    stays = long_prompt(table)
    assert (stays.row, stays.pull_row) == (0, -1)
    report(table, "busy", LoadReport(running_requests=50, running_tokens=5000))
    goes = long_prompt(table)
    assert (goes.row, goes.pull_row, goes.pull_tokens) == (1, 0, 1024)
    parts = goes.indicators
    assert parts["wait_ms"][1] == pytest.approx(2 + 1024 * 0.01, abs=1)
    assert parts["prefill_ms"][1] == 0, "one token is left"
    assert parts["if_pulled_ms"].tolist()[0] == -1, "it has it"
    assert parts["if_pulled_ms"][1] == pytest.approx(goes.scores[1], abs=1)
    assert parts["if_computed_ms"][1] - parts["if_pulled_ms"][1] == pytest.approx(1023 * 0.105 - 12, abs=2)


def test_nothing_is_pulled_that_takes_longer_than_to_compute_it() -> None:
    slow = replace(PULLS, pull_token_ms=0.2)
    table = with_kv("busy", "idle", costs=slow)
    cache(table, "busy", *LONG)
    report(table, "busy", LoadReport(running_requests=50, running_tokens=5000))
    assert (long_prompt(table).row, long_prompt(table).pull_row) == (1, -1)


def test_what_is_computed_sooner_than_it_comes_is_not_waited_for() -> None:
    table = with_kv("busy", "idle")
    table.placed("first", "busy", 1024, 0.0, marks_of(LONG, 16))
    report(table, "busy", LoadReport(running_requests=50, running_tokens=5000))
    decision = long_prompt(table)
    assert (decision.row, decision.pull_row) == (1, -1)
    parts = decision.indicators
    assert parts["if_awaited_ms"][0] == -1, "the source waits for itself"
    comes_ms, compute_ms = 1024 * (0.1 + (10 + 50 + 5) / (2048 - 50)) + 2 + 10.24, 1023 * (0.1 + 10 / 2048)
    assert parts["if_awaited_ms"][1] - parts["if_computed_ms"][1] == pytest.approx(comes_ms - compute_ms, abs=2)


def test_what_is_being_computed_is_pulled_once_it_is_there_if_that_is_cheapest() -> None:
    table = with_kv("busy", "waits")
    table.placed("first", "busy", 1024, 0.0, marks_of(LONG, 16))
    report(table, "busy", LoadReport(running_requests=50, running_tokens=5000))
    report(table, "waits", LoadReport(running_requests=4, running_tokens=400, queued_prefill_tokens=1000))
    placement = place(table, Penstock(), request("second", prompt_tokens=1024, blocks=LONG))
    assert placement.pull is not None
    assert (placement.instance.instance_id, placement.pull.source.instance_id) == ("waits", "busy")
    assert placement.pull.comes_ms == pytest.approx(1024 * (0.1 + (10 + 50 + 5) / (2048 - 50)))
    assert placement.pull.pull_ms == pytest.approx(2 + 1024 * 0.01)


def test_who_waits_for_a_pull_is_waited_for_as_long_and_what_it_computes_then() -> None:
    """A chain: nothing is queued at the second instance, which waits for the first one; the third is to wait for it."""
    table, policy = with_kv("first", "second", "third"), Penstock()
    table.placed("a", "first", 1024, 0.0, marks_of(LONG, 16), computed_ms=400.0)
    report(table, "first", LoadReport(running_requests=50, running_tokens=5000, queued_prefill_tokens=3000))
    for busy in ("second", "third"):
        report(table, busy, LoadReport(running_requests=4, running_tokens=400, queued_prefill_tokens=9000))
    longer, longest = (*LONG, *range(200, 232)), (*LONG, *range(200, 264))
    asked_s = 0.1
    second = place(table, policy, request("b", 1536, longer, now_s=asked_s))
    assert second.pull is not None
    assert second.pull.comes_ms == pytest.approx(300.0), "as was thought, less the time since"
    report(table, second.instance.instance_id, LoadReport(running_requests=4, running_tokens=400))
    parts = place(table, policy, request("c", 2048, longest, now_s=asked_s)).decision.indicators
    row = 1 if second.instance.instance_id == "second" else 2
    assert parts["wait_ms"][row] == int(second.computed_ms), "there too: its pull has not come"


def test_what_takes_long_to_be_computed_is_not_waited_for() -> None:
    table = with_kv("busy", "waits")
    table.placed("first", "busy", 1024, 0.0, marks_of(LONG, 16))
    report(table, "busy", LoadReport(running_requests=50, running_tokens=5000, queued_prefill_tokens=40_000))
    report(table, "waits", LoadReport(running_requests=4, running_tokens=400, queued_prefill_tokens=35_000))
    assert "if_awaited_ms" not in long_prompt(table).indicators


def test_a_pull_while_others_are_computed_costs_no_time() -> None:
    table = with_kv("has", "waits")
    cache(table, "has", *LONG)
    report(table, "has", LoadReport(running_requests=90, running_tokens=9000))
    report(table, "waits", LoadReport(queued_requests=1, queued_prefill_tokens=2000))
    decision = long_prompt(table)
    assert (decision.row, decision.pull_row) == (1, 0)
    assert decision.indicators["wait_ms"][1] == int(2000 * (0.1 + 10 / 2048))


def test_of_two_sources_the_one_whose_link_is_free_is_asked() -> None:
    table, policy = with_kv("a", "b", "c"), Penstock()
    for busy in "ab":
        cache(table, busy, *LONG)
        report(table, busy, LoadReport(running_requests=50, running_tokens=5000))
    assert [long_prompt(table, policy).pull_row for _ in range(3)] == [0, 1, 0]
    assert long_prompt(table, policy, now_s=1.0).pull_row == 0, "both are free again"


def test_what_the_host_has_is_loaded_where_that_is_cheaper_than_to_compute_or_to_pull_it() -> None:
    table = with_kv("a", "b")
    cache(table, "a", *LONG[:32])
    found = asked(table, request(prompt_tokens=1024, blocks=LONG))
    decision = Penstock().decide(replace(found, host_tokens=np.array([512, 1024])))
    assert (decision.row, decision.pull_row) == (1, -1)
    assert decision.indicators["wait_ms"].tolist()[1] == int(1 + 1024 * 0.005)
    assert decision.indicators["if_loaded_ms"][0] == -1, "nothing more than it has"
    pulled = Penstock().decide(replace(found, host_tokens=np.array([512, 128])))
    assert pulled.indicators["if_loaded_ms"][1] > pulled.indicators["if_pulled_ms"][1]


def test_instances_that_differ_are_priced_by_their_own_costs() -> None:
    table = with_kv("has", "pulls", "waits", costs=PULLS)
    table.kv_costed("waits", "1", KvCosts())
    cache(table, "has", *LONG)
    report(table, "has", LoadReport(running_requests=50, running_tokens=5000))
    decision = long_prompt(table)
    assert (decision.row, decision.pull_row) == (1, 0)
    assert decision.indicators["if_pulled_ms"][2] > 1e9
    table.kv_costed("has", "1", KvCosts())
    assert long_prompt(table).pull_row == -1, "nobody is asked who cannot be"


def test_any_policy_gets_the_prefix_pulled_where_it_has_placed_the_request() -> None:
    table = with_kv("a", "b")
    cache(table, "a", *LONG)
    report(table, "a", LoadReport(running_requests=50, running_tokens=5000))
    placement = place(table, LeastLoaded(), request(prompt_tokens=1024, blocks=LONG))
    assert placement.instance.instance_id == "b"
    assert placement.pull is not None
    assert (placement.pull.source.instance_id, placement.pull.tokens) == ("a", 1024)
    view = table.snapshot("m")
    assert view is not None
    assert view.unreported_prefill_tokens.tolist() == [0, 0], "only the last token is left"


def test_a_placement_says_what_its_pull_takes_and_what_computing_would() -> None:
    table = with_kv("busy", "idle")
    cache(table, "busy", *LONG)
    report(table, "busy", LoadReport(running_requests=50, running_tokens=5000))
    placement = place(table, Penstock(), replace(request(prompt_tokens=1024, blocks=LONG), now_s=0.0))
    assert placement.pull is not None
    assert (placement.instance.instance_id, placement.pull.source.instance_id) == ("idle", "busy")
    assert placement.pull.tokens == 1024
    assert placement.pull.pull_ms == pytest.approx(2 + 1024 * 0.01)
    snapshot = table.snapshot("m")
    assert snapshot is not None
    fixed, token, _, _, pair = snapshot.costs[:, 1].tolist()
    steps = max(1.0, 1024 / int(snapshot.step_tokens[1]))
    assert placement.pull.compute_ms == pytest.approx(fixed * steps + 1024 * (token + 512 * pair))


def test_what_only_the_host_of_another_one_has_is_loaded_there_and_pulled() -> None:
    table = with_kv("host", "idle")
    cache(table, "host", *LONG[:16])
    table.cached("host", "1", KvBlocks(stored=tuple(LONG), tier=KvTier.HOST))
    wanted = request(prompt_tokens=1024, blocks=LONG)
    here = place(table, Penstock(), wanted)
    assert (here.instance.instance_id, here.pull, here.loaded_tokens) == ("host", None, 1024 - 256)
    report(table, "host", LoadReport(running_requests=50, running_tokens=5000))
    for policy in (Penstock(), LeastLoaded()):
        placement = place(table, policy, replace(wanted, request_id=policy.name))
        assert placement.pull is not None
        assert (placement.instance.instance_id, placement.pull.source.instance_id) == ("idle", "host")
        assert (placement.pull.tokens, placement.pull.loads_tokens) == (1024, 1024 - 256)
        assert placement.pull.comes_ms == pytest.approx(1 + (1024 - 256) * 0.005)
        assert placement.loaded_tokens == 0
        if policy.name == "penstock":
            wait_ms = 2 + 1024 * 0.01 + 1 + (1024 - 256) * 0.005
            assert placement.decision.indicators["wait_ms"][1] == int(wait_ms)
            assert placement.decision.indicators["if_pulled_from_host_ms"][1] == int(placement.decision.scores[1])


@pytest.mark.parametrize("how", ["has it", "is to have it", "could load it"])
def test_who_has_failed_the_request_is_not_asked_for_its_prefix(how: str) -> None:
    """It would refuse or, where it hangs, be waited for. Who has half of it is asked instead."""
    sources = []
    for excluded in (frozenset[str](), frozenset({"failed"})):
        table = with_kv("failed", "half", "idle")
        for busy in ("failed", "half"):
            report(table, busy, LoadReport(running_requests=50, running_tokens=5000))
        cache(table, "half", *LONG[:32])
        match how:
            case "has it":
                cache(table, "failed", *LONG)
            case "is to have it":
                table.placed("first", "failed", 1024, 0.0, marks_of(LONG, 16), computed_ms=1.0)
            case _:
                table.cached("failed", "1", KvBlocks(stored=tuple(LONG), tier=KvTier.HOST))
        placement = place(table, Penstock(), request("r", 1024, LONG, excluded=excluded))
        assert placement.instance.instance_id == "idle"
        assert placement.pull is not None
        sources.append((placement.pull.source.instance_id, placement.pull.tokens))
    assert sources == [("failed", 1024), ("half", 512)]


def test_a_host_that_all_instances_share_is_nobodys_source() -> None:
    table = with_kv("a", "b")
    for each in "ab":
        table.cached(each, "1", KvBlocks(stored=tuple(LONG), tier=KvTier.HOST))
    placement = place(table, Penstock(), request(prompt_tokens=1024, blocks=LONG))
    assert (placement.pull, placement.loaded_tokens) == (None, 1024)
