"""The token ids of one request, prompt and generated ones in one row."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.model.prefix_hash import root_hash
from controlplane.model.request import EngineRequest
from mesh.errors import RequestRefused
from simulator.instance.config import InstanceConfig
from simulator.instance.script import Script


class RequestTokens:
    """Token ids by position: known at first (prompt, emitted elsewhere), then the script's."""

    __slots__ = ("adapter_digest", "cache_salt", "known", "media", "prompt_tokens", "root_hash", "sampling", "script")

    def __init__(self, request: EngineRequest, config: InstanceConfig) -> None:
        """Raises `RequestRefused` for a request that no engine with this config can serve."""
        self.sampling = request.sampling
        self.media = request.media_spans
        self.cache_salt, self.adapter_digest = request.cache_salt, request.adapter_digest
        self.root_hash = root_hash(request.cache_salt, request.adapter_digest)
        self.prompt_tokens = len(request.prompt_token_ids)
        _check_lengths(request, config.max_model_len_tokens)
        vocabulary_tokens = config.output.vocabulary_tokens
        prompt = _checked_ids(request.prompt_token_ids, vocabulary_tokens)
        emitted = _checked_ids(request.emitted_token_ids, vocabulary_tokens)
        self.known = np.concatenate((prompt, emitted)) if len(emitted) else prompt
        self.script = Script(
            prompt,
            request.emitted_token_ids,
            request.sampling,
            config.max_model_len_tokens,
            config.output,
            self.media,
            request.adapter_digest,
        )

    def between(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Token ids at the positions start .. stop - 1, counted from the start of the prompt."""
        known = self.known[start:stop]
        if stop <= len(self.known):
            return known
        first = max(start, len(self.known)) - self.prompt_tokens
        scripted = np.array(self.script.token_ids(first, stop - self.prompt_tokens), dtype=np.uint32)
        return np.concatenate((known, scripted))


def _check_lengths(request: EngineRequest, max_model_len_tokens: int) -> None:
    sampling = request.sampling
    emitted_tokens = len(request.emitted_token_ids)
    tokens = len(request.prompt_token_ids) + emitted_tokens
    if not request.prompt_token_ids:
        raise RequestRefused(f"request {request.request_id}: the prompt is empty; send at least one token")
    if tokens >= max_model_len_tokens:
        raise RequestRefused(
            f"request {request.request_id}: {tokens} tokens leave no room for an answer within the context "
            f"length of {max_model_len_tokens}; shorten the prompt"
        )
    if sampling.max_tokens <= emitted_tokens:
        raise RequestRefused(
            f"request {request.request_id}: max_tokens is {sampling.max_tokens} and {emitted_tokens} tokens are "
            "emitted already; nothing is left to generate"
        )
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise RequestRefused(
            f"request {request.request_id}: min_tokens ({sampling.min_tokens}) must lie between 0 and "
            f"max_tokens ({sampling.max_tokens})"
        )
    if sampling.temperature < 0 or (sampling.logprobs is not None and sampling.logprobs < 0):
        raise RequestRefused(f"request {request.request_id}: temperature and logprobs must not be negative")
    if any(not word for word in sampling.bad_words):
        raise RequestRefused(f"request {request.request_id}: a bad word must hold at least one token")


def _checked_ids(token_ids: Sequence[int], vocabulary_tokens: int) -> NDArray[np.uint32]:
    if not token_ids:
        return np.zeros(0, dtype=np.uint32)
    try:
        ids = np.array(token_ids, dtype=np.int64)
    except OverflowError:
        raise RequestRefused("a token id does not fit into 64 bits; send ids of the model's vocabulary") from None
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary_tokens:
        raise RequestRefused(
            f"token ids {int(ids.min())}..{int(ids.max())} are outside the vocabulary of {vocabulary_tokens} tokens"
        )
    return ids.astype(np.uint32)
