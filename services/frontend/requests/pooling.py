"""From the bodies of pooling requests to prompts, and from vectors to scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.model.pooling import PoolingTask
from services.frontend.errors import bad_request, context_too_long
from services.frontend.placement.pooler import PoolingRequest, Vectors
from services.frontend.requests.models import ServedModel
from services.frontend.requests.pooling_schema import MAX_INPUTS, InputFields, PoolingFields
from services.frontend.requests.service import FrontendService


@dataclass(frozen=True, slots=True)
class Pooled:
    """What came of all prompts of a request."""

    rows: Sequence[Vectors]
    """Of each prompt: one vector, or one for each token."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """One client request while it is answered."""

    service: FrontendService
    model: ServedModel
    body: PoolingFields
    request_id: str
    ends_s: float

    async def pool(
        self, prompts: Sequence[list[int]], task: PoolingTask, param: str, dimensions: int | None = None
    ) -> Pooled:
        """`param`: where in the body the prompts come from. Raises ApiError."""
        fitting = [self._fitting(prompt, param) for prompt in prompts]
        request = PoolingRequest(
            request_id=self.request_id,
            model=self.model.name,
            ends_s=self.ends_s,
            deadline_s=self.service.settings.request_deadline_s,
            prompts=fitting,
            task=task,
            dimensions=dimensions,
            use_activation=self.body.use_activation,
            priority=self.body.priority or 0,
        )
        rows = await self.service.pooler.results(request)
        prompt_tokens = sum(len(prompt) for prompt in fitting)
        self.service.metrics.of(self.model.name).prompt_tokens.inc(prompt_tokens)
        return Pooled(rows, prompt_tokens)

    def task(self, wanted: PoolingTask | None, param: str = "task") -> PoolingTask:
        """The one that is asked for, by a parameter, or the model's first. Raises ApiError (400)."""
        does = pooling_tasks(self.model)
        if wanted is None:
            return does[0]
        if wanted not in does:
            raise bad_request(f"`{self.model.name}` does not {wanted}; it does {', '.join(does)}.", param)
        return wanted

    async def scores(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[float], int]:
        """How well the texts of each pair fit, and the number of their tokens: by the classifier of a cross-encoder,
        else by the angle of vectors, else by the best match of each token (late interaction). Raises ApiError."""
        does = pooling_tasks(self.model)
        if "classify" in does and "embed" not in does:
            pooled = await self.pool([self._joined(*pair) for pair in pairs], "classify", "documents")
            if any(rows.size != 1 for rows in pooled.rows):
                raise bad_request(f"`{self.model.name}` has several classes; a score needs a model with one.", "model")
            return [float(rows[0, 0]) for rows in pooled.rows], pooled.prompt_tokens
        task: PoolingTask = "embed" if "embed" in does else self.task("token_embed")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        pooled = await self.pool([await self.tokens(text, "documents") for text in texts], task, "documents")
        rows = dict(zip(texts, pooled.rows, strict=True))
        return [similarity(rows[first], rows[second]) for first, second in pairs], pooled.prompt_tokens

    async def tokens(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """Of one input. Raises ApiError (400) for one that is too long whatever its tokens are."""
        limit, fewest_tokens = self.model.max_model_len_tokens, self.model.text.fewest_tokens(text)
        if self.body.truncate_prompt_tokens is None and fewest_tokens > limit:
            raise context_too_long(fewest_tokens, 0, limit, param, is_least=True)
        token_ids = await self.model.text.chunked.encode_in(self.service.threads, text)
        return self.model.text.with_added_tokens(token_ids) if add_special_tokens else token_ids

    def _joined(self, first: str, second: str) -> list[int]:
        if self.model.text.has_segments:
            raise bad_request(
                f"`{self.model.name}` tells the two texts of a pair apart by segment ids, which cannot be served yet.",
                "model",
            )
        return self.model.text.pair(first, second)

    def _fitting(self, prompt: list[int], param: str) -> list[int]:
        limit, truncate = self.model.max_model_len_tokens, self.body.truncate_prompt_tokens
        if truncate is not None:
            prompt = prompt[: limit if truncate == -1 else truncate]
        if not prompt:
            raise bad_request("An input must hold at least one token.", param)
        if len(prompt) > limit:
            raise context_too_long(len(prompt), 0, limit, param)
        if max(prompt) >= self.model.text.vocabulary_size:
            raise bad_request(
                f"`{self.model.name}` has {self.model.text.vocabulary_size} tokens; an id is beyond.", param
            )
        return prompt


def pooling_tasks(model: ServedModel) -> tuple[PoolingTask, ...]:
    """Raises ApiError (400) for a model that generates."""
    known: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")
    if model.adapter is not None:
        raise bad_request(f"`{model.name}` is a LoRA adapter; those of pooling models are not served.", "model")
    does = tuple(task for task in known if task in model.tasks)
    if not does:
        raise bad_request(
            f"`{model.name}` generates; a pooling model is needed (its workers run with --engine-arg runner=pooling).",
            "model",
        )
    return does


async def input_prompts(call: PoolingCall, body: InputFields) -> list[list[int]]:
    """Token ids of each input. Raises ApiError (400)."""
    given: Sequence[str | int | list[int]] = [body.input] if isinstance(body.input, str) else body.input
    numbers = [item for item in given if isinstance(item, int)]
    if len(numbers) == len(given):
        return [numbers]
    if len(given) > MAX_INPUTS:
        raise bad_request(f"At most {MAX_INPUTS} inputs can be given at once.", "input")
    if numbers:
        raise bad_request("`input` must hold texts and lists of token ids, or the token ids of one input.", "input")
    return [
        await call.tokens(item, "input", add_special_tokens=body.add_special_tokens)
        if isinstance(item, str)
        else list(item)
        for item in given
        if not isinstance(item, int)
    ]


def text_pairs(first: str | list[str] | None, second: str | list[str] | None) -> list[tuple[str, str]]:
    """Each with each: one against several, or as many against as many. Raises ApiError (400)."""
    if first is None or second is None:
        param = "text_1" if first is None else "text_2"
        raise bad_request(f"Missing required parameter: `{param}`.", param, "missing_required_parameter")
    firsts, seconds = ([each] if isinstance(each, str) else each for each in (first, second))
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise bad_request(f"{len(firsts)} texts against {len(seconds)}: give one, or as many.", "text_2")
    return list(zip(firsts, seconds, strict=True))


def similarity(first: Vectors, second: Vectors) -> float:
    """The cosine of two vectors; of token vectors, the mean of each first token's best match among the second's."""
    lengths = np.linalg.norm(first, axis=1)[:, None] * np.linalg.norm(second, axis=1)[None, :]
    cosines = first @ second.T / np.maximum(lengths, 1e-12)
    return float(cosines.max(axis=1).mean())
