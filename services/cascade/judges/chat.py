"""A model behind an OpenAI-compatible endpoint as the judge."""

import math
from collections.abc import Callable, Mapping

import httpx
import msgspec

from mesh.errors import JudgeUnavailable
from services.cascade.judges.interface import JudgedAnswer

# A grade from the probabilities of the tokens that a judge might have said (pure).


TOP_GRADE = 9
"""Grades are one digit, one token in every tokenizer."""
MIN_GRADED = 0.5
"""At least this much of the probability must lie on grades, or the model was not grading."""

INSTRUCTIONS = (
    "You grade answers. Read the question and the answer, then give one digit from 0 (useless or wrong) to "
    f"{TOP_GRADE} (correct, complete and to the point). Reply with the digit alone."
)


def question(prompt: str, answer: str) -> str:
    """The prompt that asks a model to grade an answer with one digit."""
    return f"Question:\n{prompt}\n\nAnswer:\n{answer}\n\nGrade (0 to {TOP_GRADE}):"


def score_of(logprobs: Mapping[str, float]) -> float:
    """0 to 100: the expected grade over the tokens that are grades, whatever blanks they come with.

    Finer than the grade that was said: a judge that wavers between 6 and 7 scores in between. Raises
    `JudgeUnavailable` where the tokens are mostly no grades.
    """
    weights = [0.0] * (TOP_GRADE + 1)
    total = 0.0
    for token, logprob in logprobs.items():
        probability = math.exp(min(logprob, 0.0))
        total += probability
        grade = token.strip().lstrip("▁Ġ")
        if len(grade) == 1 and grade in "0123456789":
            weights[int(grade)] += probability
    graded = sum(weights)
    # Of a truncated list of tokens only what is listed is known; what is listed must be grades in the main.
    if total <= 0 or graded < MIN_GRADED * total:
        likeliest = max(logprobs, key=lambda token: logprobs[token], default="")
        raise JudgeUnavailable(f"the judge did not reply with a grade, but with {likeliest!r}")
    return 100.0 / TOP_GRADE * sum(grade * weight for grade, weight in enumerate(weights)) / graded


TOP_LOGPROBS = 20
MAX_JUDGED_CHARACTERS = 60_000
"""Of prompt and answer each; the beginning and the end of what is longer are judged."""


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float


class _Position(msgspec.Struct):
    top_logprobs: list[_TopLogprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] = []


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


class ChatJudge:
    """A `Judge` that asks a model for a one-token grade and reads the score from that token's probabilities.

    `find_url` gives the endpoint's base URL at the moment, ending in /v1 (frontends come and go); empty: there is none.
    """

    def __init__(
        self,
        name: str,
        model: str,
        find_url: Callable[[], str],
        deadline_s: float,
        api_key: str = "",
        http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._find_url = find_url
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(timeout=deadline_s, headers=headers, transport=http)

    async def score(self, judged: JudgedAnswer) -> float:
        url = self._find_url()
        if not url:
            raise JudgeUnavailable(f"no frontend is there to reach the judge {self._model} through")
        try:
            response = await self._client.post(f"{url}/chat/completions", json=self._body(judged))
        except httpx.HTTPError as error:
            raise JudgeUnavailable(f"{url}: {str(error) or type(error).__name__}") from error
        if response.status_code != httpx.codes.OK:
            raise JudgeUnavailable(f"{url} answers {response.status_code}: {response.text[:200]}")
        return score_of(_first_token(response.content))

    async def close(self) -> None:
        await self._client.aclose()

    def _body(self, judged: JudgedAnswer) -> dict[str, object]:
        asked = question(_shortened(judged.prompt), _shortened(judged.answer))
        return {
            "model": self._model,
            "messages": [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": asked}],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
        }


def _first_token(body: bytes) -> dict[str, float]:
    try:
        completion = msgspec.json.decode(body, type=_Completion)
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        return {each.token: each.logprob for each in logprobs.content[0].top_logprobs}
    except (msgspec.MsgspecError, IndexError, AssertionError) as error:
        raise JudgeUnavailable(
            "the judge's reply has no log-probabilities; choose an endpoint that gives them"
        ) from error


def _shortened(text: str) -> str:
    if len(text) <= MAX_JUDGED_CHARACTERS:
        return text
    half = MAX_JUDGED_CHARACTERS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"
