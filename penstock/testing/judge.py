"""What every judge owes the mesh.

    class TestLength(JudgeConformance):
        judge = "length:50"

Judges are made from the text that operators write, so the package must be installed.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

import pytest
import pytest_asyncio

from mesh.errors import JudgeUnavailable
from services.cascade.judges.interface import Judge, JudgeContext, JudgedAnswer
from services.cascade.judges.parse import make_judge

LOGPROBS: Final = (math.log(0.9), math.log(0.5), 0.0)
ODD_ANSWERS: Final = (
    JudgedAnswer("", "", ""),
    JudgedAnswer("?", "", "small"),
    JudgedAnswer("?", "\x00\ud7ff\n", "small", LOGPROBS),
    JudgedAnswer("?", "word " * 50_000, "small", LOGPROBS * 20_000),
    JudgedAnswer("?", "yes", "small", (-math.inf, -1e300)),
)


@pytest.mark.asyncio(loop_scope="function")
class JudgeConformance:
    """Subclass and set `judge`; the tests are inherited."""

    judge: str
    """As operators write it, with what stands behind the colon."""
    answers: tuple[JudgedAnswer, ...] = (
        JudgedAnswer("What is 2 + 2?", "4", "small", LOGPROBS),
        JudgedAnswer("Count from 7 up to 9.", "7 8 9", "large", LOGPROBS * 3),
    )
    """Answers that it can score."""

    def context(self) -> JudgeContext:
        """What it is made with; for a judge that asks others, where these are."""
        return JudgeContext(find_frontend=lambda: "", deadline_s=10.0)

    @pytest_asyncio.fixture
    async def made(self) -> AsyncIterator[Judge]:
        judge = make_judge(self.judge, self.context())
        yield judge
        await judge.close()

    async def score(self, judge: Judge, answer: JudgedAnswer) -> float:
        """Within the deadline, or the next judge would be asked."""
        async with asyncio.timeout(self.context().deadline_s):
            return await judge.score(answer)

    async def test_it_is_called_what_operators_write(self, made: Judge) -> None:
        assert made.name == self.judge

    async def test_scores_are_0_to_100(self, made: Judge) -> None:
        for answer in self.answers:
            assert 0.0 <= await self.score(made, answer) <= 100.0 + 1e-9

    async def test_an_answer_is_scored_alike_again(self, made: Judge) -> None:
        for answer in self.answers:
            assert await self.score(made, answer) == pytest.approx(await self.score(made, answer))

    @pytest.mark.parametrize("answer", ODD_ANSWERS, ids=("nothing", "no answer", "controls", "long", "impossible"))
    async def test_what_it_cannot_score_is_refused_so_that_the_next_judge_is_asked(
        self, made: Judge, answer: JudgedAnswer
    ) -> None:
        with suppress(JudgeUnavailable):
            assert 0.0 <= await self.score(made, answer) <= 100.0 + 1e-9

    async def test_many_at_once_are_scored_as_if_alone(self, made: Judge) -> None:
        alone = [await self.score(made, answer) for answer in self.answers]
        together = await asyncio.gather(*(self.score(made, answer) for answer in self.answers * 16))
        assert list(together) == pytest.approx(alone * 16)

    async def test_it_may_be_closed_twice(self) -> None:
        judge = make_judge(self.judge, self.context())
        await judge.close()
        await judge.close()
