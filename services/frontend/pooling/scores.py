"""How well texts fit each other: pairs of them, made into prompts, and scores of what the model makes of these."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.model.pooling import JOINED, SEPARATED, PoolingTask
from services.frontend.errors import bad_request
from services.frontend.placement.pooler import Vectors
from services.frontend.pooling.call import PoolingCall
from services.frontend.pooling.inputs import Fit, text_tokens
from services.frontend.pooling.schema import Parts, ScoreRequest, ScoringFields, Text, Texts

_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""What vLLM calls the two sides, in the order in which it looks for them."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What came of all pairs."""

    scores: Sequence[float]
    prompt_tokens: int


def sides(body: ScoreRequest) -> tuple[str, str]:
    """The names by which the body gives the two. Raises ApiError (400) where one is missing."""
    for names in _SIDES:
        if all(getattr(body, name) is not None for name in names):
            return names
    param = next((second for first, second in _SIDES if getattr(body, first) is not None), "text_1")
    raise bad_request(f"Missing required parameter: `{param}`.", param, "missing_required_parameter")


async def scores(
    call: PoolingCall, body: ScoringFields, first: Texts, second: Texts, params: tuple[str, str]
) -> Scored:
    """One text against each of several, or as many against as many: by the classifier of a cross-encoder, by the angle
    of vectors, or by the best match of each token (late interaction), after what the model is for. `params`: where the
    texts come from. Raises ApiError."""
    fit = Fit.of(body, call.model)
    firsts = await _cut(call, _texts(first, params[0]), body.max_tokens_per_query, "max_tokens_per_query")
    seconds = await _cut(call, _texts(second, params[1]), body.max_tokens_per_doc, "max_tokens_per_doc")
    if not seconds:
        raise bad_request(f"`{params[1]}` must hold at least one text.", params[1])
    if len(firsts) not in (1, len(seconds)):
        raise bad_request(f"{len(firsts)} texts against {len(seconds)}: give one, or as many.", params[1])
    task = call.task(None)
    if task == "classify":
        return await _cross_encoded(call, body, fit, firsts, seconds, params[1])
    if task not in ("embed", "token_embed"):
        raise bad_request(f"`{call.model.name}` does {task}, of which no scores come.", "model")
    return await _compared(call, body, fit, firsts, seconds, task, params[1])


@dataclass(frozen=True, slots=True)
class _Pair:
    token_ids: list[int]
    first_segment_tokens: int
    """So many of them are of the first text, and what goes with it."""


async def _cross_encoded(
    call: PoolingCall, body: ScoringFields, fit: Fit, firsts: list[str], seconds: list[str], param: str
) -> Scored:
    """A prompt for each pair."""
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    pairs = [await _pair(call, *pair, fit, param) for pair in zip(firsts, seconds, strict=True)]
    prompts = [each.token_ids for each in pairs]
    rows = await call.pool(
        prompts,
        "classify",
        use_activation=body.use_activation,
        cache_salt=body.cache_salt,
        first_segments=[each.first_segment_tokens for each in pairs] if call.model.text.has_segments else (),
    )
    if any(each.size != 1 for each in rows):
        raise bad_request(f"`{call.model.name}` has several classes; a score needs a model with one.", "model")
    return Scored([float(each[0, 0]) for each in rows], sum(map(len, prompts)))


async def _pair(call: PoolingCall, first: str, second: str, fit: Fit, param: str) -> _Pair:
    """Two texts as one prompt: in the tokenizer's form for pairs, or, for a reranker that a language model was made
    into, one behind the other."""
    model, text = call.model, call.model.text
    if model.pair_form == JOINED:
        prompt = fit.text(await text_tokens(call, first + second, fit, param), param)
        return _Pair(prompt, len(prompt))
    if text.has_segments and model.pair_form != SEPARATED:
        raise bad_request(f"The workers of `{model.name}` take no segment ids: upgrade them.", "model")
    kept_tokens = fit.kept_tokens if fit.truncation_side is None else None
    token_ids, segments = await call.service.threads.run(text.pair, first, second, kept_tokens)
    prompt, segments = fit.tokens(token_ids, param), fit.cut(segments)
    return _Pair(prompt, segments.index(1) if 1 in segments else len(prompt))


async def _compared(
    call: PoolingCall,
    body: ScoringFields,
    fit: Fit,
    firsts: list[str],
    seconds: list[str],
    task: PoolingTask,
    param: str,
) -> Scored:
    """A prompt for each text; one that stands there twice is computed once and counted twice, as vLLM counts."""
    texts = list(dict.fromkeys((*firsts, *seconds)))
    prompts = {each: fit.text(await text_tokens(call, each, fit, param), param) for each in texts}
    pooled = await call.pool(
        list(prompts.values()), task, use_activation=body.use_activation, cache_salt=body.cache_salt
    )
    rows = dict(zip(texts, pooled, strict=True))
    prompt_tokens = sum(len(prompts[each]) for each in (*firsts, *seconds))
    score = cosine if task == "embed" else best_matches
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    pairs = zip(firsts, seconds, strict=True)
    return Scored([score(rows[one], rows[other]) for one, other in pairs], prompt_tokens)


def cosine(first: Vectors, second: Vectors) -> float:
    """The cosine of the angle between two vectors."""
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float((first * second).sum()) / max(lengths, 1e-8)


def best_matches(first: Vectors, second: Vectors) -> float:
    """ColBERT's MaxSim (Khattab and Zaharia, 2020, section 3.3): the sum, over the tokens of the query, of the greatest
    product with a token of the document."""
    return float((first @ second.T).max(axis=1).sum())


def _texts(given: Texts, param: str) -> list[str]:
    """Raises ApiError (400) for what is more than text."""
    return [_text(each, param) for each in (given if isinstance(given, list) else [given])]


def _text(given: Text, param: str) -> str:
    if not isinstance(given, Parts):
        return given
    if given.content is None:
        if given.text is None:
            raise bad_request(f"`{param}` must hold texts, or objects with `content` or `text`.", param)
        return given.text
    if any(part.type != "text" or part.text is None for part in given.content):
        raise bad_request("Pooling models are served with text only.", param, "unsupported_parameter")
    return "".join(part.text or "" for part in given.content)


async def _cut(call: PoolingCall, texts: list[str], most_tokens: int, param: str) -> list[str]:
    """The beginning of each text, of so many tokens; 0: all of it. Raises ApiError (400)."""
    if most_tokens >= (limit := call.model.max_model_len_tokens):
        raise bad_request(f"`{param}` must be below the model's context of {limit} tokens.", param)
    if not most_tokens:
        return texts
    beginning, threads = call.model.text.beginning, call.service.threads
    return [await threads.run(beginning, each, most_tokens) for each in texts]
