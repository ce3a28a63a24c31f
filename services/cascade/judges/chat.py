"""A model behind an OpenAI-compatible endpoint as the judge: how it is asked, and what its verdict is worth."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from mesh.errors import ConfigurationError, JudgeUnavailable
from services.cascade.judges.interface import JudgedAnswer
from services.cascade.judges.verdict import expected_value, rubric_digest, said_value

TOP_LOGPROBS = 20
MAX_JUDGED_CHARACTERS = 60_000
"""Of prompt and answer each; the beginning and the end of what is longer are judged."""
MAX_DRAWS = 32
MAX_THINK_TOKENS = 65_536
_VERDICT_TOKENS = 8
"""For a verdict in words: a digit or a letter and the blanks around it."""
_SHARE_OF_DRAWS = 0.5
"""At least so many of the draws must be verdicts, or the model was not judging."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What stands behind the question mark in `model:NAME?draws=5&think=2048`."""

    draws: int = 0
    """Verdicts that are drawn and averaged, for a model that gives no log-probabilities; 0: one reply, read from the
    probabilities of what it might have said."""
    think_tokens: int = 0
    """That the model may think before its verdict; 0: it does not think."""
    rubric: str = ""
    """Digest of the operator's own instructions; empty: Penstock's."""


def split_options(argument: str) -> tuple[str, ChatOptions]:
    """What stands before the question mark, and the options behind it. Raises `ConfigurationError`."""
    rest, _, query = argument.partition("?")
    options: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        name, _, value = pair.partition("=")
        if name in ("draws", "think"):
            most = MAX_DRAWS if name == "draws" else MAX_THINK_TOKENS
            if not value.isdecimal() or not 1 <= int(value) <= most:
                raise ConfigurationError(f"the judge's option {name} is a number from 1 to {most}, got {value!r}")
            options["draws" if name == "draws" else "think_tokens"] = int(value)
        elif name == "rubric" and value:
            options["rubric"] = value
        else:
            raise ConfigurationError(
                f"a judge has no option {pair!r}; there are draws=N, think=TOKENS and rubric=DIGEST "
                "(which `penstock cascade set --rubric FILE` adds)"
            )
    return rest, ChatOptions(**options)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question to the model, and what each verdict is worth."""

    system: str
    user: str
    values: Mapping[str, float]
    """Of each verdict, one character, 0 to 1."""


Ask = Callable[[JudgedAnswer, str], tuple[Asked, ...]]
"""Makes the questions about an answer, by a rubric or, if that is empty, by Penstock's own instructions."""

TOP_GRADE = 9
"""Grades are one digit, one token in every tokenizer."""
_GRADES: Final = {str(grade): grade / TOP_GRADE for grade in range(TOP_GRADE + 1)}
GRADING = (
    "You grade answers. Read the question and the answer, then give one digit from 0 (useless or wrong) to "
    f"{TOP_GRADE} (correct, complete and to the point)."
)
PREFERRING = (
    "You compare two answers to a question. Say A if answer A is better, B if answer B is better, and C if they are "
    "equally good. Longer is not better."
)
_DIGIT_ALONE = "Reply with the digit alone."
_LETTER_ALONE = "Reply with the letter alone."


def grading(judged: JudgedAnswer, rubric: str) -> tuple[Asked, ...]:
    """One question: the answer's grade."""
    question = f"Question:\n{_shortened(judged.prompt)}\n\nAnswer:\n{_shortened(judged.answer)}\n\n"
    return (Asked(f"{rubric or GRADING} {_DIGIT_ALONE}", f"{question}Grade (0 to {TOP_GRADE}):", _GRADES),)


def preferring(judged: JudgedAnswer, rubric: str) -> tuple[Asked, ...]:
    """Two questions: is the answer no worse than the reference, in either order? Models prefer what comes first. None
    about the reference itself."""
    if judged.reference is None:
        raise JudgeUnavailable(
            "there is no answer to compare with; a preference labels samples and judges nothing else"
        )
    if judged.answer == judged.reference:
        return ()
    question, answer, reference = map(_shortened, (judged.prompt, judged.answer, judged.reference))

    def asked(first: str, second: str, own: str) -> Asked:
        user = f"Question:\n{question}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nBetter (A, B or C):"
        values = {letter: float(letter in (own, "C")) for letter in "ABC"}
        return Asked(f"{rubric or PREFERRING} {_LETTER_ALONE}", user, values)

    return asked(answer, reference, "A"), asked(reference, answer, "B")


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float


class _Position(msgspec.Struct):
    token: str = ""
    top_logprobs: list[_TopLogprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


class ChatJudge:
    """A `Judge` that asks a model for a verdict of one token and reads the score from that token's probabilities, or
    from several draws where the model gives none.

    `find_url` gives the endpoint's base URL at the moment, ending in /v1 (frontends come and go); empty: there is none.
    `ask` makes the questions; the score is the mean of what their verdicts are worth, 100 where there is no question.
    """

    def __init__(
        self,
        name: str,
        model: str,
        find_url: Callable[[], str],
        deadline_s: float,
        api_key: str = "",
        http: httpx.AsyncBaseTransport | None = None,
        options: ChatOptions | None = None,
        rubric: str = "",
        ask: Ask = grading,
    ) -> None:
        """Raises `ConfigurationError` where `rubric` is not the one that the options name."""
        self.name = name
        self._model = model
        self._find_url = find_url
        self._options = options or ChatOptions()
        if self._options.rubric and self._options.rubric != rubric_digest(rubric):
            raise ConfigurationError(
                f"the judge {name} has a rubric of its own, which is not the cascade's: set it by "
                "`penstock cascade set --rubric FILE`, which writes its digest into the judge's name"
            )
        self._rubric = rubric if self._options.rubric else ""
        self._ask = ask
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(timeout=deadline_s, headers=headers, transport=http)

    async def score(self, judged: JudgedAnswer) -> float:
        url = self._find_url()
        if not url:
            raise JudgeUnavailable(f"no frontend is there to reach the judge {self._model} through")
        worth = await asyncio.gather(*(self._worth(url, asked) for asked in self._ask(judged, self._rubric)))
        return 100.0 * sum(worth) / len(worth) if worth else 100.0

    async def close(self) -> None:
        await self._client.aclose()

    async def _worth(self, url: str, asked: Asked) -> float:
        """0 to 1."""
        if not self._options.draws:
            choice = await self._choice(url, self._body(asked))
            return self._worth_of(choice, asked.values)
        drawn = await asyncio.gather(
            *(self._choice(url, self._body(asked, seed)) for seed in range(self._options.draws)), return_exceptions=True
        )
        return _mean_of(drawn, asked.values)

    def _worth_of(self, choice: _Choice, values: Mapping[str, float]) -> float:
        positions = [] if choice.logprobs is None else choice.logprobs.content or []
        if self._options.think_tokens:
            if choice.finish_reason == "length":
                raise JudgeUnavailable(f"the judge was still thinking after {self._options.think_tokens} tokens")
            # What it thought stands before its verdict, in the log-probabilities too.
            verdict = next((each for each in reversed(positions) if each.token.strip() in values), None)
            if verdict is None or not verdict.top_logprobs:
                return said_value(_text(choice), values)
            return expected_value({each.token: each.logprob for each in verdict.top_logprobs}, values)
        if not positions:
            raise JudgeUnavailable(
                "the judge's reply has no log-probabilities; choose an endpoint that gives them, or have several "
                f"verdicts drawn ({self.name}{'&' if '?' in self.name else '?'}draws=5)"
            )
        return expected_value({each.token: each.logprob for each in positions[0].top_logprobs}, values)

    async def _choice(self, url: str, body: dict[str, object]) -> _Choice:
        try:
            response = await self._client.post(f"{url}/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise JudgeUnavailable(f"{url}: {str(error) or type(error).__name__}") from error
        if response.status_code != httpx.codes.OK:
            raise JudgeUnavailable(f"{url} answers {response.status_code}: {response.text[:200]}")
        try:
            return msgspec.json.decode(response.content, type=_Completion).choices[0]
        except (msgspec.MsgspecError, IndexError) as error:
            raise JudgeUnavailable(
                f"{url} gives no reply that can be read, with neither a message nor log-probabilities"
            ) from error

    def _body(self, asked: Asked, seed: int | None = None) -> dict[str, object]:
        thinks, draws = self._options.think_tokens, seed is not None
        body: dict[str, object] = {
            "model": self._model,
            "messages": [{"role": "system", "content": asked.system}, {"role": "user", "content": asked.user}],
            "max_tokens": thinks + _VERDICT_TOKENS if thinks else (_VERDICT_TOKENS if draws else 1),
            "temperature": 1 if draws else 0,
        }
        if draws:
            body["seed"] = seed
        else:
            body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        return body


def _mean_of(drawn: Sequence[_Choice | BaseException], values: Mapping[str, float]) -> float:
    """Of the draws that are verdicts. Raises `JudgeUnavailable` where too few are, with why the last one is none."""
    worth: list[float] = []
    reason = ""
    for choice in drawn:
        if isinstance(choice, JudgeUnavailable):
            reason = str(choice)
        elif isinstance(choice, BaseException):
            raise choice
        else:
            try:
                worth.append(said_value(_text(choice), values))
            except JudgeUnavailable as error:
                reason = str(error)
    if len(worth) < _SHARE_OF_DRAWS * len(drawn):
        raise JudgeUnavailable(f"{len(worth)} of {len(drawn)} draws are verdicts; the others: {reason}")
    return sum(worth) / len(worth)


def _text(choice: _Choice) -> str:
    return (choice.message.content if choice.message is not None else None) or ""


def _shortened(text: str) -> str:
    if len(text) <= MAX_JUDGED_CHARACTERS:
        return text
    half = MAX_JUDGED_CHARACTERS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"
