"""What prompts that come do to answers that are decoded beside them."""

import numpy as np
import pytest
from msgspec.structs import replace

from controlplane.model.cluster import ClusterTable
from controlplane.model.placement import PlacementProblem
from controlplane.model.step_costs import DATASHEET_COSTS
from controlplane.policies.penstock import Penstock
from controlplane.policies.prompts_to_come import REMEMBERED_S, PromptsToCome, prompt_work_ms
from tests.unit.controlplane.builders import cache, cluster, request
from tests.unit.controlplane.policies.problems import LONG, asked

PROMPT_TOKENS = 2000


def at(table: ClusterTable, now_s: float) -> PlacementProblem:
    return asked(table, replace(request(prompt_tokens=PROMPT_TOKENS), now_s=now_s))


def after(prompts: int, every_s: float) -> tuple[ClusterTable, PromptsToCome, float]:
    """That many prompts one after the other on the first of two instances, and the time then."""
    table, to_come = cluster("a", "b"), PromptsToCome()
    for number in range(prompts):
        problem = at(table, number * every_s)
        to_come.placed(problem, 0, prompt_work_ms(problem, 0, 0))
    return table, to_come, prompts * every_s


def test_an_answer_takes_longer_by_the_share_of_the_time_that_prompts_take() -> None:
    table, to_come, now_s = after(1000, every_s=0.5)
    work_s = PROMPT_TOKENS * (0.103 + 9.9 / 2048 + 3.4e-6 * PROMPT_TOKENS / 2) / 1000
    chunk_ms = 0.103 * 2048
    expected = work_s / 0.5 * chunk_ms / (9.9 + chunk_ms)
    assert to_come.slowdown(at(table, now_s)).tolist() == pytest.approx([expected, 0.0], rel=0.05, abs=1e-6)


def test_it_is_known_soon_after_the_start() -> None:
    long_ago, soon = after(1000, every_s=0.5), after(40, every_s=0.5)
    late, early = (to_come.slowdown(at(table, now_s))[0] for table, to_come, now_s in (long_ago, soon))
    assert early == pytest.approx(late, rel=0.1)


def test_few_prompts_say_that_some_come_but_not_where() -> None:
    table, to_come, now_s = after(1, every_s=1.0)
    slowdowns = to_come.slowdown(at(table, now_s))
    assert slowdowns[0] > slowdowns[1] > 0.7 * slowdowns[0] > 0.05


@pytest.mark.parametrize("seconds", [0.2, 1.0, 5.0, 60.0])
def test_the_first_prompt_does_not_send_those_after_it_away_from_its_prefix(seconds: float) -> None:
    table, policy = cluster("a", "b", "c"), Penstock()
    first = replace(request(prompt_tokens=1040, blocks=LONG), now_s=0.0)
    row = policy.decide(asked(table, first)).row
    cache(table, "abc"[row], *LONG)
    assert policy.decide(asked(table, replace(first, now_s=seconds))).row == row


def test_prompts_take_no_more_than_all_of_the_time() -> None:
    table, to_come, now_s = after(1000, every_s=0.001)
    assert 0.9 < to_come.slowdown(at(table, now_s))[0] < 1


def test_prompts_are_forgotten() -> None:
    table, to_come, now_s = after(100, every_s=0.5)
    before = to_come.slowdown(at(table, now_s))[0]
    assert to_come.slowdown(at(table, now_s + REMEMBERED_S))[0] < before / 2
    assert to_come.slowdown(at(table, now_s + 20 * REMEMBERED_S))[0] < 1e-6


def test_instances_may_come_and_go() -> None:
    table, to_come, now_s = after(1000, every_s=0.5)
    before = to_come.slowdown(at(table, now_s))
    table.lost("b", "1")
    assert to_come.slowdown(at(table, now_s)).tolist() == pytest.approx([before[0]])
    more = cluster("0", "a", "c")
    assert to_come.slowdown(at(more, now_s)).tolist() == pytest.approx([0.0, before[0], 0.0], abs=1e-6)


def test_prompts_of_an_instance_that_has_gone_say_nothing_of_the_others() -> None:
    table, to_come = cluster("a", "b", "c"), PromptsToCome()
    for number in range(100):
        problem = at(table, number / 10)
        to_come.placed(problem, 2 if number else 0, prompt_work_ms(problem, 0, 0))
    table.lost("c", "1")
    slowdowns = to_come.slowdown(at(table, 10.0))
    assert slowdowns[0] > slowdowns[1] > 0.6 * slowdowns[0] > 0, "one prompt is hardly more than chance"


def test_a_request_goes_where_fewer_prompts_have_come_of_late() -> None:
    table, policy = cluster("a", "b"), Penstock()
    only_a = np.array([True, False])
    for number in range(20):
        policy.decide(replace(at(table, number / 2), candidates=only_a))
    decision = policy.decide(at(table, 10.0))
    assert decision.row == 1
    parts = decision.indicators
    assert parts["decode_ms"][0] > 1.2 * parts["decode_ms"][1]
    assert parts["others_ms"].tolist() == [0, 0]


def test_who_may_be_decoded_elsewhere_is_not_held_up() -> None:
    table, policy = cluster("a", "b"), Penstock()
    for instance_id in "ab":
        table.costed(instance_id, "1", DATASHEET_COSTS)
    only_a = np.array([True, False])
    for number in range(20):
        policy.decide(replace(at(table, number / 2), candidates=only_a))
    scores = policy.decide(replace(at(table, 10.0), is_decode_chosen_later=True)).scores
    assert scores[0] == scores[1]
