"""How the mesh's sampling parameters are said to vLLM, a request that goes on after emitted tokens included. Pure.

vLLM sees a continued request as a new one whose prompt ends with the emitted tokens. A parameter goes to
vLLM under its own name, as it is, unless something follows from that:

- max_tokens, min_tokens, offsets, EOS and stop tokens, logit_bias, repetition_penalty (which counts the prompt
  anyway) and greedy decoding: exact.
- frequency_penalty: vLLM no longer counts the emitted tokens, so their share is added to the logit bias. Exact
  as long as repetition_penalty is 1, which vLLM applies between the two.
- presence_penalty: likewise, but a token that was emitted before and is generated again after is penalised twice.
- bad_words: vLLM looks at the tokens that it has generated itself. Of a word that has begun among the emitted ones, the
  rest is not generated at all any more: more is forbidden than was asked for, rather than less.
- logprobs: vLLM takes a number or names, and counts the names itself.
- prompt_logprobs: the prompt's were told before anything was emitted.
- structured_outputs: exact, where the engine's connector gives the fresh grammar the emitted tokens
  (`connector/grammar.py`).
- thinking_token_budget: vLLM counts the reasoning that a prompt ends with. Exact.
- seed: the state of the random generator is lost. The continuation draws from a seed derived from the request's
  and its position: the same for whoever continues there, but not what an uninterrupted run would have drawn.
"""

import json
from collections import Counter
from typing import Any

from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.model.sampling import parameters
from engine_worker.engines.vllm.checkpoint import Vocabulary

_SEED_MASK = (1 << 63) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it are spread evenly (Knuth, TAOCP 3, section 6.4)."""


def sampling_arguments(request: EngineRequest, vocabulary: Vocabulary) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for what is left of the request, which `refusal` let pass."""
    sampling = request.sampling
    emitted = len(request.emitted_token_ids)
    stop_token_ids = sampling.stop_token_ids
    if not sampling.ignore_eos:
        stop_token_ids += vocabulary.eos_token_ids
    names = parameters(SamplingParams).keys() - {"vllm_xargs"}
    arguments = {name: _argument(getattr(sampling, name)) for name in names}
    return {
        **arguments,
        "max_tokens": sampling.max_tokens - emitted,
        "min_tokens": max(0, sampling.min_tokens - emitted),
        "seed": _seed(sampling.seed, emitted),
        "stop_token_ids": sorted(set(stop_token_ids)),
        "logit_bias": _logit_bias(request) or None,
        # Words as text would need vLLM's tokenizer, which may not be loaded; this is what it makes of them.
        "bad_words": None,
        "_bad_words_token_ids": _bad_words(request) or None,
        "logprobs": None if sampling.logprob_token_ids else sampling.logprobs,
        "prompt_logprobs": None if emitted else sampling.prompt_logprobs,
        "structured_outputs": json.loads(sampling.structured_outputs) if sampling.structured_outputs else None,
        "extra_args": json.loads(sampling.vllm_xargs) if sampling.vllm_xargs else None,
        "detokenize": False,
        # Made for this request alone, so vLLM need not copy it.
        "skip_clone": True,
    }


def _argument(value: Any) -> Any:
    """vLLM wants lists, and None for none."""
    return (list(value) or None) if isinstance(value, tuple) else value


def refusal(
    request: EngineRequest, vocabulary: Vocabulary, *, max_model_len_tokens: int, max_logprobs: int
) -> str | None:
    """Why this engine can never serve the request; None if it can. What vLLM itself checks when it takes the
    parameters (ranges of temperature, top_p and so on) is left to it."""
    sampling = request.sampling
    context = request.prompt_token_ids + request.emitted_token_ids
    if not request.prompt_token_ids:
        return "the prompt is empty: send at least one token"
    if len(context) >= max_model_len_tokens:
        return (
            f"the prompt has {len(context)} tokens and the model's context is {max_model_len_tokens}, of which one"
            " must be left to generate: shorten the prompt"
        )
    emitted = len(request.emitted_token_ids)
    if sampling.max_tokens <= emitted:
        return f"max_tokens is {sampling.max_tokens} and {emitted} tokens were emitted before: nothing is left to do"
    wanted = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
    if wanted > max_logprobs:
        return f"at most {max_logprobs} logprobs can be asked for, got {wanted}"
    named = (*context, *sampling.named_token_ids)
    if min(named) < 0 or max(named) >= vocabulary.size:
        worst = min(named) if min(named) < 0 else max(named)
        return f"token id {worst} is outside the vocabulary of {vocabulary.size} tokens"
    return None


def _logit_bias(request: EngineRequest) -> dict[int, float]:
    sampling = request.sampling
    bias = dict(sampling.logit_bias)
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token_id, count in Counter(request.emitted_token_ids).items():
            penalty = sampling.frequency_penalty * count + sampling.presence_penalty
            bias[token_id] = bias.get(token_id, 0.0) - penalty
    return bias


def _bad_words(request: EngineRequest) -> list[list[int]]:
    """The words, and the rest of each that the emitted tokens may have begun."""
    words, emitted = request.sampling.bad_words, request.emitted_token_ids
    rests = [word[begun:] for word in words for begun in range(1, len(word)) if emitted[-begun:] == word[:begun]]
    return [list(word) for word in (*words, *rests)]


def _seed(seed: int | None, emitted: int) -> int | None:
    if seed is None or emitted == 0:
        return seed
    return (seed + emitted * _GOLDEN_RATIO) & _SEED_MASK
