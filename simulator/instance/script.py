"""What a request will say: fixed by its prompt and seed before the first token comes out.

Every token is a function of (prompt, position, seed, LoRA adapter) alone, so batching, timing, preemption, migration
and recovery cannot change it; and since the end is known too, the instance only has to count.

Parameters that say which tokens may come (allowed_token_ids, bad_words, a logit_bias of 100 or -100) are kept. Those
that shape a real model's distribution (top_p, penalties...) have no effect here, as `without_effect` says. A
temperature above 0 without a seed says the same as temperature 0. JSON and choices are said in their form
(`fitting_text`), byte by byte.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from controlplane.model.media import MediaSpan
from controlplane.model.request import FinishReason, PositionLogprobs, SamplingParams, TokenLogprob
from controlplane.model.sampling import parameters
from mesh.errors import RequestRefused
from simulator.instance.config import OutputConfig
from simulator.instance.fitting_text import NotSimulated, fitting_text, leaves_text_free
from simulator.instance.splitmix import stream_words

_WORD = 1 << 64
_LENGTH_STREAM = 0xA5A5_5A5A_0F0F_F0F0
_LOGPROB_STREAM = 0x3C3C_C3C3_9696_6969


_PROMPT_LOGPROB_STREAM = 0x5A5A_A5A5_C3C3_3C3C
_FORCED, _BANNED = 100.0, -100.0
"""A bias from which on OpenAI promises that a token comes, and down to which that it does not."""

HONOURED: Final = frozenset(
    (
        "max_tokens",
        "min_tokens",
        "temperature",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "allowed_token_ids",
        "bad_words",
        "structured_outputs",
    )
)
"""The sampling parameters that have an effect here; `logit_bias` has one where it decides alone."""


def without_effect(sampling: SamplingParams) -> tuple[str, ...]:
    """Names of the parameters that are set, and that no simulated answer depends on."""
    return tuple(
        name
        for name, parameter in parameters(SamplingParams).items()
        if name not in HONOURED
        and getattr(sampling, name) != parameter.default
        and (name != "logit_bias" or any(_BANNED < bias < _FORCED for _, bias in sampling.logit_bias))
    )


class Script:
    """All tokens that one request will generate, some of them already generated elsewhere.

    `total_tokens` counts both and the end of sequence; `finish_reason` says why nothing follows. Token ids
    are worked out when they are first read.
    """

    __slots__ = (
        "_config",
        "_emitted_tail",
        "_emitted_tokens",
        "_key",
        "_prompt_token_ids",
        "_sampling",
        "_token_ids",
        "finish_reason",
        "total_tokens",
    )

    def __init__(
        self,
        prompt_token_ids: NDArray[np.uint32],
        emitted_token_ids: Sequence[int],
        sampling: SamplingParams,
        max_model_len_tokens: int,
        config: OutputConfig,
        media: Sequence[MediaSpan] = (),
        adapter_digest: str = "",
    ) -> None:
        """`media`: of the prompt; answers depend on their contents."""
        self._config = config
        self._sampling = sampling
        self._emitted_tokens = len(emitted_token_ids)
        reach = max(map(len, sampling.bad_words), default=0)
        self._emitted_tail = list(emitted_token_ids[-reach:]) if reach else []
        """What a bad word may have begun with."""
        self._prompt_token_ids = prompt_token_ids if sampling.prompt_logprobs is not None else None
        self._key = xxh3_64_intdigest(prompt_token_ids.tobytes(), _seed_word(sampling))
        for span in media:
            self._key = xxh3_64_intdigest(span.media_hash.encode(), self._key)
        if adapter_digest:
            self._key = xxh3_64_intdigest(adapter_digest.encode(), self._key)
        self._token_ids: list[int] | None = None
        room_tokens = max_model_len_tokens - len(prompt_token_ids)
        if sampling.structured_outputs and not leaves_text_free(sampling.structured_outputs):
            self._say(_spelled(sampling.structured_outputs, self._key, config), room_tokens)
        else:
            self._set_end(room_tokens)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Token ids at the positions start .. stop - 1, none of them before the emitted ones' end."""
        if not self._emitted_tokens <= start <= stop <= self.total_tokens:
            raise ValueError(f"positions {start}..{stop} are not within {self._emitted_tokens}..{self.total_tokens}")
        if self._token_ids is None:
            self._token_ids = self._work_out(self.total_tokens)
        return self._token_ids[start - self._emitted_tokens : stop - self._emitted_tokens]

    def logprobs(self, position: int) -> PositionLogprobs:
        """The chosen token's logprob and the most likely tokens, as many as the request asked for, or those that it
        names behind the chosen one.

        Greedy requests always choose the likeliest token; sampled ones now and then its runner-up.
        """
        chosen_id = self.token_ids(position, position + 1)[0]
        first, second = stream_words(self._key ^ _LOGPROB_STREAM, 2 * position, 2).tolist()
        best = 0.5 + 0.45 * first / _WORD
        decay = 0.9 * (1.0 - best)
        greedy = self._sampling.temperature == 0.0
        rank = 0 if greedy or second >= _WORD // 8 else 1
        if named := self._sampling.logprob_token_ids:
            shown = tuple(
                TokenLogprob(token_id, math.log(best) + self._index(token_id, chosen_id, rank) * math.log(decay))
                for token_id in dict.fromkeys((chosen_id, *named))
            )
            return PositionLogprobs(shown[0], shown)
        candidates = self._candidates(chosen_id, rank, max(self._sampling.logprobs or 0, rank + 1))
        ranked = [
            TokenLogprob(token_id, math.log(best) + index * math.log(decay))
            for index, token_id in enumerate(candidates)
        ]
        chosen = ranked[candidates.index(chosen_id)]
        return PositionLogprobs(chosen=chosen, top=tuple(ranked[: self._sampling.logprobs or 0]))

    def prompt_logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Those of the prompt's tokens but the first; none if they were not asked for, or told before."""
        prompt, wanted = self._prompt_token_ids, self._sampling.prompt_logprobs
        if prompt is None or wanted is None or self._emitted_tokens:
            return ()
        words = stream_words(self._key ^ _PROMPT_LOGPROB_STREAM, 0, len(prompt)).tolist()
        return tuple(
            self._prompt_position(token_id, word / _WORD, wanted)
            for token_id, word in zip(prompt[1:].tolist(), words[1:], strict=True)
        )

    def _prompt_position(self, token_id: int, share: float, wanted: int) -> PositionLogprobs:
        """The prompt's token is the likeliest at every other place, and the last of those shown elsewhere."""
        best = 0.5 + 0.45 * share
        rank = 0 if share < 0.5 else wanted
        candidates = self._candidates(token_id, rank, max(wanted, rank + 1))
        ranked = [
            TokenLogprob(candidate, math.log(best) + index * math.log(0.9 * (1.0 - best)))
            for index, candidate in enumerate(candidates)
        ]
        return PositionLogprobs(ranked[candidates.index(token_id)], tuple(ranked[:wanted]))

    def _candidates(self, chosen_id: int, rank: int, wanted: int) -> list[int]:
        """Distinct token ids, likeliest first, with the chosen one at `rank`; at most one per possible token."""
        low, high = self._config.first_token_id, self._config.last_token_id
        size = high - low + 1
        offset = chosen_id - low
        rivals = (low + (offset + step) % size for step in range(1, size + 1))
        candidates: list[int] = []
        for token_id in rivals:
            if len(candidates) >= wanted - 1:
                break
            if token_id != chosen_id:
                candidates.append(token_id)
        candidates.insert(rank, chosen_id)
        return candidates

    def _index(self, token_id: int, chosen_id: int, rank: int) -> int:
        """Where `_candidates` would have the token; behind all of them if it is none that is spoken."""
        low, high = self._config.first_token_id, self._config.last_token_id
        if not low <= token_id <= high:
            return high - low + 1
        steps = (token_id - chosen_id) % (high - low + 1)
        if steps == 0:
            return rank
        return steps - 1 if steps <= rank else steps

    def _say(self, token_ids: list[int], room_tokens: int) -> None:
        """These and nothing else, as far as they may be said."""
        emitted, limit = self._emitted_tokens, min(self._sampling.max_tokens, room_tokens)
        if emitted >= len(token_ids):
            raise RequestRefused("the tokens that were emitted before are not those of this engine")
        is_whole = len(token_ids) <= limit
        self.total_tokens = len(token_ids) if is_whole else limit
        self.finish_reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
        self._token_ids = token_ids[emitted : self.total_tokens]

    def _set_end(self, room_tokens: int) -> None:
        sampling = self._sampling
        limit = min(sampling.max_tokens, room_tokens)
        self.total_tokens, self.finish_reason = limit, FinishReason.LENGTH
        if not sampling.ignore_eos and _may_come(self._config.eos_token_id, sampling):
            # Masked until min_tokens have come out, as in vLLM: the earliest end is the token after them.
            ends_at = max(self._natural_tokens(), sampling.min_tokens + 1, self._emitted_tokens + 1)
            if ends_at <= limit:
                self.total_tokens, self.finish_reason = ends_at, FinishReason.STOP
        if sampling.stop_token_ids:
            self._token_ids = self._work_out(self.total_tokens)
            for position in range(max(sampling.min_tokens, self._emitted_tokens), self.total_tokens):
                if self._token_ids[position - self._emitted_tokens] in sampling.stop_token_ids:
                    self.total_tokens, self.finish_reason = position + 1, FinishReason.STOP
                    break

    def _natural_tokens(self) -> int:
        first, second = stream_words(self._key ^ _LENGTH_STREAM, 0, 2).tolist()
        # Box-Muller: two uniform words make one normal variate.
        normal = math.sqrt(-2.0 * math.log((first + 1) / _WORD)) * math.cos(2.0 * math.pi * second / _WORD)
        config = self._config
        tokens = round(min(config.median_tokens * math.exp(config.sigma * normal), float(config.longest_tokens)))
        return min(max(tokens, config.shortest_tokens), config.longest_tokens)

    def _work_out(self, total_tokens: int) -> list[int]:
        first = self._emitted_tokens
        words = stream_words(self._key, first, total_tokens - first)
        allowed = _spoken(self._config, self._sampling)
        chosen = allowed[words % np.uint64(len(allowed))]
        stops = self._sampling.stop_token_ids
        masked = min(self._sampling.min_tokens, total_tokens) - first
        if stops and masked > 0:
            spoken = allowed[~np.isin(allowed, stops)]
            if len(spoken):
                early = np.isin(chosen[:masked], stops)
                chosen[:masked][early] = spoken[words[:masked][early] % np.uint64(len(spoken))]
        token_ids: list[int] = chosen.tolist()
        if any(len(word) > 1 for word in self._sampling.bad_words):
            self._avoid_bad_words(token_ids, allowed.tolist())
        if self.finish_reason is FinishReason.STOP:
            token_ids[-1] = self._config.eos_token_id
        return token_ids

    def _avoid_bad_words(self, token_ids: list[int], allowed: list[int]) -> None:
        """Put the next token that may come in the place of one that would complete a bad word."""
        words = [word for word in self._sampling.bad_words if len(word) > 1]
        lasts = {word[-1] for word in words}
        said = list(self._emitted_tail)
        before = len(said)
        for position, token_id in enumerate(token_ids):
            if token_id in lasts:
                bad = {word[-1] for word in words if tuple(said[1 - len(word) :]) == word[:-1]}
                if token_id in bad:
                    turn = bisect_left(allowed, token_id)
                    later = (allowed[(turn + step) % len(allowed)] for step in range(1, len(allowed)))
                    token_ids[position] = next((one for one in later if one not in bad), token_id)
            said.append(token_ids[position])
        assert len(said) == before + len(token_ids)


def _may_come(token_id: int, sampling: SamplingParams) -> bool:
    """Whether no parameter forbids it at every position."""
    forced = {each for each, bias in sampling.logit_bias if bias >= _FORCED}
    if (token_id,) in sampling.bad_words or (token_id, _BANNED) in sampling.logit_bias:
        return False
    return (not sampling.allowed_token_ids or token_id in sampling.allowed_token_ids) and (
        not forced or token_id in forced
    )


def _spoken(config: OutputConfig, sampling: SamplingParams) -> NDArray[np.int64]:
    """The tokens of which an answer is made, ascending. What would leave none is not kept: a real engine would say
    anything, too."""
    token_ids = _vocabulary(config)
    if not (sampling.allowed_token_ids or sampling.logit_bias or sampling.bad_words):
        return token_ids
    if allowed := sorted({*sampling.allowed_token_ids} - {config.eos_token_id}):
        token_ids = np.array(allowed, dtype=np.int64)
    forced = [token_id for token_id, bias in sampling.logit_bias if bias >= _FORCED and token_id != config.eos_token_id]
    banned = [token_id for token_id, bias in sampling.logit_bias if bias <= _BANNED]
    banned += [word[0] for word in sampling.bad_words if len(word) == 1]
    if forced and not sampling.allowed_token_ids:
        token_ids = np.array(sorted(forced), dtype=np.int64)
    for others, are_wanted in ((forced, True), (banned, False)):
        left = token_ids[np.isin(token_ids, others, invert=not are_wanted)]
        token_ids = left if len(left) else token_ids
    return token_ids


@lru_cache(maxsize=16)
def _vocabulary(config: OutputConfig) -> NDArray[np.int64]:
    token_ids = np.arange(config.first_token_id, config.last_token_id + 1, dtype=np.int64)
    spoken: NDArray[np.int64] = token_ids[token_ids != config.eos_token_id]
    words = spoken[np.isin(spoken, config.word_token_ids)]
    return words if len(words) else spoken


def _spelled(structure: str, key: int, config: OutputConfig) -> list[int]:
    """Text of this form, and the end of sequence."""
    if not config.byte_token_ids:
        raise RequestRefused(
            "this simulated engine has no tokens for bytes, of which it would make text of a given form"
        )
    try:
        text = fitting_text(structure, key)
    except NotSimulated as error:
        raise RequestRefused(f"a simulated engine cannot answer in this form: {error}") from error
    return [*(config.byte_token_ids[byte] for byte in text.encode()), config.eos_token_id]


def _seed_word(sampling: SamplingParams) -> int:
    if sampling.temperature == 0.0 or sampling.seed is None:
        return 0
    return (2 * sampling.seed + 1) % _WORD
