"""POST /v1/systemone, vLLM's own: questions about a state, answered by how likely the model's reply begins with the
label of each option."""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from controlplane.model.sampling import INT32_MAX
from mesh.runtime import Threads
from services.frontend.errors import ApiError, bad_request
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import prompt_ids
from services.frontend.requests.schema import CacheSalt, ChatCompletionRequest
from services.frontend.requests.scoring_schema import AS_IT_IS, one_token
from services.frontend.requests.unsupported import refuse_unsupported

MAX_QUESTIONS: Final = 64
_FORMS_OF_THEIR_OWN: Final = frozenset(("lfm2_vl", "diffusion_gemma"))
"""Types of models that vLLM asks in other words, or by more than a token."""
_THINKING: Final = "enable_thinking"


class DecisionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/systemone"""

    model: Annotated[str, Meta(max_length=256)] = ""
    """May be left out where there is one model."""
    state: Any
    """What the questions are about: a text, or any JSON."""
    questions: Annotated[dict[str, dict[str, Any]], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    """By their ids: `type` (`choice`, `noul` or `score`), `instructions`, `criteria`."""
    instructions: str | None = None
    """What stands before the state, as the system's turn."""
    images: list[str] | None = None
    audio: list[str] | None = None
    videos: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    """Only prompts of the same salt find this one's KV in the prefix cache."""
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    """Lower is served first."""
    request_id: str | None = None
    """The client's own id of the request; the header `x-request-id` goes before it."""


class QuestionType(StrEnum):
    """By the names that requests have for them."""

    CHOICE = "choice"
    """One of named options."""
    NOUL = "noul"
    """Yes or no."""
    SCORE = "score"
    """A level of a scale."""


_LABELS: Final[Mapping[QuestionType, Sequence[str]]] = MappingProxyType(
    {
        QuestionType.CHOICE: string.ascii_uppercase,
        QuestionType.NOUL: ("yes", "no"),
        QuestionType.SCORE: string.digits,
    }
)
_REPLIES: Final[Mapping[QuestionType, str]] = MappingProxyType(
    {
        QuestionType.CHOICE: "Answer with the letter of one option only.",
        QuestionType.NOUL: "Answer with yes or no only.",
        QuestionType.SCORE: "Answer with the number of one level only.",
    }
)
"""How vLLM ends a question: the model is asked in the same words."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question, its options in the order of their labels."""

    id: str
    type: QuestionType
    instructions: str
    options: tuple[str, ...]
    descriptions: tuple[str | None, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """What the reply begins with, by option."""
        return tuple(_LABELS[self.type][: len(self.options)])

    @property
    def text(self) -> str:
        """As the model reads it, behind the state."""
        lines = [f"Question: {self.instructions}"] if self.instructions else []
        for label, option, description in zip(self.labels, self.options, self.descriptions, strict=True):
            names = [label] if self.type is QuestionType.NOUL else [f"{label}: {option}"]
            about = ": " if self.type is QuestionType.NOUL else " - "
            lines.append(about.join([*names, description] if description else names))
        return "\n".join([*lines, _REPLIES[self.type]])


def questions_of(request: DecisionRequest) -> list[Question]:
    """The questions in the order of the request. Raises ApiError (400)."""
    for name in ("images", "audio", "videos"):
        if getattr(request, name):
            raise bad_request("Questions are about a text or JSON, not about media.", name, "unsupported_parameter")
    return [_question(name, fields) for name, fields in request.questions.items()]


def _question(name: str, fields: Mapping[str, Any]) -> Question:
    where = f"questions.{name}"
    if not name:
        raise bad_request("A question has an empty id.", "questions")
    if unknown := sorted(fields.keys() - {"type", "instructions", "criteria"}):
        raise bad_request(f"Unknown parameter: `{where}.{unknown[0]}`.", f"{where}.{unknown[0]}", "unknown_parameter")
    try:
        kind = QuestionType(fields.get("type", ""))
    except ValueError:
        message = f"`{where}.type` must be one of {', '.join(QuestionType)}."
        raise bad_request(message, f"{where}.type", "invalid_value") from None
    options = list(_options(kind, fields.get("criteria"), f"{where}.criteria"))
    names = tuple(option for option, _ in options)
    if len(set(names)) != len(names):
        raise bad_request(f"`{where}.criteria` has a level twice.", f"{where}.criteria", "invalid_value")
    if len(names) > len(_LABELS[kind]):
        message = f"`{where}.criteria` may have {len(_LABELS[kind])} options at most."
        raise bad_request(message, f"{where}.criteria", "invalid_value")
    instructions = fields.get("instructions", "")
    return Question(
        name, kind, "" if instructions is None else str(instructions), names, tuple(about for _, about in options)
    )


def _options(kind: QuestionType, criteria: object, param: str) -> Iterator[tuple[str, str | None]]:
    """Names and descriptions. Raises ApiError (400)."""
    if kind is QuestionType.SCORE:
        if not isinstance(criteria, list) or len(criteria) < 2:
            raise bad_request(f"`{param}` must be the list of levels, two at least.", param, "invalid_value")
        yield from ((str(level), None) for level in criteria)
    elif kind is QuestionType.CHOICE:
        if not isinstance(criteria, dict) or not criteria:
            raise bad_request(f"`{param}` must have the options, and a text or null of each.", param, "invalid_value")
        yield from ((name, None if about is None else str(about)) for name, about in criteria.items())
    else:
        criteria = {} if criteria is None else criteria
        if not isinstance(criteria, dict) or not criteria.keys() <= {"true", "false"}:
            raise bad_request(f"`{param}` may have `true` and `false`, and a text of each.", param, "invalid_value")
        for option, side in (("yes", "true"), ("no", "false")):
            about = criteria.get(side)
            yield option, None if about is None else str(about)


class DecisionPrompts:
    """The prompts of one request, and the tokens of its labels behind them."""

    def __init__(self, request: DecisionRequest, model: ServedModel, threads: Threads) -> None:
        self._request = request
        self._model = model
        self._threads = threads

    async def made(self, questions: Sequence[Question]) -> tuple[list[list[int]], dict[str, int]]:
        """A prompt for each question, and the token that each label is as the first of a reply. Raises ApiError (400)
        where it is none."""
        if self._model.text.model_type in _FORMS_OF_THEIR_OWN:
            message = f"Questions to `{self._model.name}` have a form of their own, which is not served here."
            raise bad_request(message, "model", "unsupported_parameter")
        if (self._request.chat_template_kwargs or {}).get(_THINKING):
            message = "The answer is how a reply begins, so the model cannot think first."
            raise bad_request(message, f"chat_template_kwargs.{_THINKING}", "invalid_value")
        end = self._behind_added_tokens(await self._rendered([{"role": "user", "content": "x"}], {}))
        tokens = {label: self._label_token(end, question, label) for question in questions for label in question.labels}
        before = [] if not self._request.instructions else [{"role": "system", "content": self._request.instructions}]
        prompts = []
        for question in questions:
            asked = {"role": "user", "content": f"{_state_text(self._request.state)}\n\n{question.text}"}
            prompt = await self._rendered([*before, asked], self._request.chat_template_kwargs or {})
            if prompt[len(prompt) - len(end) :] != end:
                message = "With these variables the prompt ends in another way, behind which no label is known."
                raise bad_request(message, "chat_template_kwargs", "invalid_value")
            prompts.append(prompt)
        return prompts, tokens

    async def _rendered(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        chat = ChatCompletionRequest(
            model=self._model.name, messages=messages, chat_template_kwargs={_THINKING: False, **variables}
        )
        refuse_unsupported(chat)
        (prompt,) = await prompt_ids(chat, self._model, self._threads)
        return prompt

    def _behind_added_tokens(self, prompt: list[int]) -> list[int]:
        added = self._model.text.added_token_ids
        return prompt[max((place + 1 for place, token in enumerate(prompt) if token in added), default=0) :]

    def _label_token(self, end: list[int], question: Question, label: str) -> int:
        text = self._model.text
        *before, token = text.encode(text.decode(end, skip_special_tokens=False) + label)
        if before != end:
            raise bad_request(
                f"`{label}` is more than one token behind a prompt of `{self._model.name}`, so questions of the type "
                f"`{question.type}` cannot be asked.",
                f"questions.{question.id}.type",
                "unsupported_parameter",
            )
        return token


def _state_text(state: object) -> str:
    return state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)


def decision_completion(
    request: DecisionRequest, prompts: list[list[int]], labels: Mapping[str, int]
) -> dict[str, Any]:
    """The completion that says how likely the labels are, and which token is the likeliest."""
    return {**AS_IT_IS, "temperature": 0, **one_token(request, prompts, sorted(set(labels.values())))}


def as_asked(error: ApiError) -> ApiError:
    """An error of the completion or of a chat within, by the name of what its client gave."""
    if error.param is not None and error.param.partition("[")[0] in ("prompt", "messages"):
        error.param = "state"
    return error
