"""The next tier begun ahead, as clients see it and as it is counted."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.protocols.cascade.escalation_odds import ENOUGH, UNBEGUN, WHOLE, Progress
from penstock.v1 import cascade_pb2, request_pb2
from tests.unit.services.frontend.cascade_of_fakes import RECORD, USER, Cascade, cascade, saying
from tests.unit.services.frontend.fakes import failure

pytestmark = pytest.mark.live

AHEAD = msgspec.structs.replace(RECORD, speculate=0.7)
AT_THE_JUDGE = Progress(WHOLE, 12)
"""Where a whole answer is of which nothing but its judge says anything."""


def expect(both: Cascade, group: Progress, escalated: bool = True) -> None:
    """As if many such answers had been decided."""
    odds = both.mesh.cascades.odds("both", 0)
    for _ in range(4 * ENOUGH):
        odds.note({group}, escalated)


def counted(both: Cascade, outcome: str) -> float | None:
    return both.mesh.metric("cascade_speculations_total", cascade="both", tier="large", outcome=outcome)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_escalation_finds_the_next_answer_begun(model_path: Path, stream: bool) -> None:
    async with cascade(model_path, lambda _: 10.0, AHEAD) as both:
        expect(both, UNBEGUN)
        small = both.mesh.workers[0]
        small.step_s = 0.05
        if stream:
            body = {"model": "both", "messages": USER, "stream": True}
            async with both.mesh.http() as http:
                text = (await http.post("/v1/chat/completions", json=body)).text
            events = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            said = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
            facts = events[-1]["penstock"]
            assert text.endswith("data: [DONE]\n\n")
        else:
            answer = (await both.ask()).parse()
            said, facts = answer.choices[0].message.content, answer.penstock
            assert answer.usage.completion_tokens == sum(each["completion_tokens"] for each in facts["tiers"])
        assert said == "Something."
        assert (facts["tier"], facts["because"]) == ("large", "last_tier")
        assert [each["begun_ahead"] for each in facts["tiers"]] == [False, True]
        assert not any(each["abandoned"] for each in facts["tiers"])
        (received,) = both.mesh.workers[1].received
        assert received.request_id.endswith("-tier1-ahead")
        assert both.mesh.scheduler.placed[1].request_id == received.request_id
        assert counted(both, "used") == 1


async def test_an_accepted_answer_has_it_aborted_and_its_tokens_counted(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 90.0, AHEAD, large_step_s=0.02) as both:
        expect(both, UNBEGUN)
        small, large = both.mesh.workers
        large.script, small.step_s = saying(both.mesh, "Something. " * 200), 0.05
        answer = (await both.ask()).parse()
        assert answer.choices[0].message.content == "Hm."
        first, second = answer.penstock["tiers"]
        assert (answer.penstock["tier"], second["abandoned"], second["score"]) == ("small", True, None)
        assert answer.usage.completion_tokens == first["completion_tokens"] + second["completion_tokens"]
        assert 0 < second["completion_tokens"] < 200
        await large.wait_until(lambda: large.aborted == [f"{answer.id}-tier1-ahead"])
        assert counted(both, "abandoned") == 1
        wasted = both.mesh.metric("cascade_speculated_tokens_wasted_total", cascade="both", tier="large")
        assert wasted == second["completion_tokens"]


async def test_what_fails_ahead_is_asked_anew_when_it_is_needed(model_path: Path) -> None:
    refused = failure(request_pb2.ERROR_CODE_ENGINE, "out of memory")
    async with cascade(model_path, lambda _: 10.0, AHEAD) as both:
        expect(both, UNBEGUN)
        small, large = both.mesh.workers
        small.step_s = 0.1
        good = large.script
        large.script = lambda request: [refused] if request.request_id.endswith("-ahead") else good(request)
        answer = (await both.ask()).parse()
        assert answer.choices[0].message.content == "Something."
        assert [each["begun_ahead"] for each in answer.penstock["tiers"]] == [False, False]
        assert counted(both, "failed") == 1


async def test_nothing_is_begun_ahead_where_the_tier_is_busy_or_an_answer_is_likely_good(model_path: Path) -> None:
    busy = msgspec.structs.replace(AHEAD, speculate_room=1)
    async with cascade(model_path, lambda _: 90.0, busy) as both:
        large = both.mesh.workers[1]
        large.script, large.step_s = saying(both.mesh, "Something. " * 200), 0.05
        other = asyncio.create_task(both.mesh.client().chat.completions.create(model="large", messages=USER))
        await large.wait_until(lambda: len(large.received) == 1)
        expect(both, UNBEGUN)
        assert len((await both.ask()).parse().penstock["tiers"]) == 1
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
    async with cascade(model_path, lambda _: 90.0, AHEAD) as both:
        expect(both, UNBEGUN, escalated=False)
        assert len((await both.ask()).parse().penstock["tiers"]) == 1
        expect(both, UNBEGUN)
        hinted: dict[str, Any] = {"extra_body": {"penstock": {"quality": 50}}}
        assert len((await both.ask(**hinted)).parse().penstock["tiers"]) == 1, "learnt under other thresholds"


async def test_odds_are_learnt_from_what_the_judge_decides_and_forgotten_with_the_thresholds(model_path: Path) -> None:
    scores = iter([10.0] * ENOUGH + [90.0] * 1000)

    def score(_: cascade_pb2.JudgeRequest) -> float:
        return next(scores)

    async with cascade(model_path, score, AHEAD) as both:
        for _ in range(ENOUGH):
            await both.ask()
        odds = both.mesh.cascades.odds("both", 0)
        odds.validate()
        assert odds.p_escalates(UNBEGUN) > 0.9
        assert odds.p_escalates(AT_THE_JUDGE) > 0.9
        answer = (await both.ask()).parse()
        assert [each["abandoned"] for each in answer.penstock["tiers"]] == [False, True]
        changed = msgspec.structs.replace(AHEAD, thresholds=(60.0,))
        await both.mesh.store.put(changed.key, msgspec.json.encode(changed))
        await both.mesh.until(lambda: both.mesh.cascades.records["both"] == changed)
        assert both.mesh.cascades.odds("both", 0).p_escalates(UNBEGUN) == 0
