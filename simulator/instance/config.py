"""The settings of a modelled instance."""

from dataclasses import dataclass, field

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """What the instance's model says: which tokens, and how many of them.

    Answer lengths (the end-of-sequence token included) are lognormal over prompts, cut to the given range.
    """

    vocabulary_tokens: int = 32_000
    """Token ids of prompts must be below."""
    first_token_id: int = 3
    last_token_id: int = 31_999
    """Answers are made of the ids first..last, the end of sequence left out."""
    eos_token_id: int = 2
    median_tokens: float = 128.0
    sigma: float = 1.0
    """Standard deviation of the logarithm of the length."""
    shortest_tokens: int = 1
    longest_tokens: int = 2048
    byte_token_ids: tuple[int, ...] = ()
    """The token of each byte, where there are such: what text of a given form is spelled with."""
    word_token_ids: tuple[int, ...] = ()
    """Tokens of whole words: of those of them within first..last answers are made that people can read. None there:
    of all."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_token_id <= self.last_token_id < self.vocabulary_tokens:
            raise ConfigurationError(
                f"answers use the token ids {self.first_token_id}..{self.last_token_id}: choose a range within "
                f"the vocabulary of {self.vocabulary_tokens}"
            )
        if not 0 <= self.eos_token_id < self.vocabulary_tokens:
            raise ConfigurationError(
                f"eos_token_id {self.eos_token_id} is outside the vocabulary of {self.vocabulary_tokens}"
            )
        if self.byte_token_ids and (
            len(self.byte_token_ids) != 256 or max(self.byte_token_ids) >= self.vocabulary_tokens
        ):
            raise ConfigurationError(f"byte_token_ids must be 256 of the {self.vocabulary_tokens} tokens, or none")
        if (
            self.word_token_ids
            and not 0 <= min(self.word_token_ids) <= max(self.word_token_ids) < self.vocabulary_tokens
        ):
            raise ConfigurationError(f"word_token_ids must be of the {self.vocabulary_tokens} tokens")
        if self.first_token_id == self.last_token_id == self.eos_token_id:
            raise ConfigurationError("answers need at least one token besides the end of sequence")
        if not 1 <= self.shortest_tokens <= self.longest_tokens or self.median_tokens <= 0 or self.sigma < 0:
            raise ConfigurationError(
                "answer lengths need 1 <= shortest_tokens <= longest_tokens, median_tokens > 0 and sigma >= 0"
            )


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """Sizes and limits, named as vLLM's where vLLM has them."""

    block_tokens: int = 16
    kv_blocks: int = 4096
    max_model_len_tokens: int = 8192
    max_batch_requests: int = 256
    """max_num_seqs"""
    max_step_tokens: int = 2048
    """max_num_batched_tokens: the token budget that decodes and prefill chunks of a step share."""
    max_queued_requests: int = 4096
    whole_prompt_must_fit: bool = True
    """Admit a request only if the KV of its whole prompt fits now, not just its first chunk
    (vLLM's scheduler_reserve_full_isl, on by default there too)."""
    block_bytes: int = 1024
    """Size of a KV block as a transfer sees it."""
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        for name in ("block_tokens", "kv_blocks", "max_model_len_tokens", "max_batch_requests", "block_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_step_tokens < self.max_batch_requests:
            raise ConfigurationError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_batch_requests "
                f"({self.max_batch_requests}): every running request decodes one token a step"
            )
        if self.max_model_len_tokens > self.kv_blocks * self.block_tokens:
            raise ConfigurationError(
                f"one request of max_model_len_tokens ({self.max_model_len_tokens}) does not fit into "
                f"{self.kv_blocks} blocks of {self.block_tokens} tokens: raise kv_blocks or lower the length"
            )
        if self.block_bytes % self.block_tokens:
            raise ConfigurationError(
                f"block_bytes ({self.block_bytes}) must be a multiple of block_tokens ({self.block_tokens})"
            )
        if self.max_queued_requests < 0:
            raise ConfigurationError(f"max_queued_requests must not be negative, got {self.max_queued_requests}")
