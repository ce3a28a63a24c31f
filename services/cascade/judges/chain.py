"""Judges in order, the next where one is down."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from mesh.errors import JudgeUnavailable
from services.cascade.judges.interface import Judge, JudgedAnswer, Judgement

log = logging.getLogger(__name__)

REST_S = 10.0
"""A judge that gave no score for want of an answer in time is left alone for so long."""


class JudgeChain:
    """Asks each judge in turn until one gives a score. A judge that does not answer in time rests for a while, so that
    one that hangs costs its deadline once, not every request."""

    def __init__(self, judges: Sequence[Judge], deadline_s: float, clock: Callable[[], float]) -> None:
        self._judges = judges
        self._deadline_s = deadline_s
        self._clock = clock
        self._rests_until_s: dict[str, float] = {}
        self._judging = 0
        self._is_replaced = False
        self._unused = asyncio.Event()
        self._unused.set()

    async def judge(self, judged: JudgedAnswer) -> Judgement:
        """Raises `JudgeUnavailable` with every judge's reason where none gives a score."""
        if self._is_replaced:
            raise JudgeUnavailable("the cascade has other judges now")
        self._judging += 1
        self._unused.clear()
        try:
            return await self._ask(judged)
        finally:
            self._judging -= 1
            if not self._judging:
                self._unused.set()

    async def close(self) -> None:
        """Close every judge, at once; what they are judging fails."""
        self._is_replaced = True
        for judge in self._judges:
            await judge.close()

    async def close_when_unused(self) -> None:
        """Judge nothing more, and close every judge once all that is being judged has a score, or at the latest when
        all judges' deadlines have passed."""
        self._is_replaced = True
        try:
            async with asyncio.timeout(self._deadline_s * len(self._judges)):
                await self._unused.wait()
        except TimeoutError:
            log.error("judges that have had their time are still asked; closing them", extra={"asked": self._judging})
        finally:
            await self.close()

    async def _ask(self, judged: JudgedAnswer) -> Judgement:
        passed_over: list[str] = []
        for judge in self._judges:
            if self._clock() < self._rests_until_s.get(judge.name, 0.0):
                passed_over.append(f"{judge.name}: did not answer in time a moment ago")
                continue
            try:
                async with asyncio.timeout(self._deadline_s):
                    score = await judge.score(judged)
            except TimeoutError:
                self._rests_until_s[judge.name] = self._clock() + REST_S
                passed_over.append(f"{judge.name}: no answer within {self._deadline_s:g} s")
                log.warning("a judge does not answer in time", extra={"judge": judge.name, "rest_s": REST_S})
            except JudgeUnavailable as error:
                passed_over.append(f"{judge.name}: {error}")
            else:
                return Judgement(score, judge.name, tuple(passed_over))
        raise JudgeUnavailable("; ".join(passed_over) or "no judge is configured")
