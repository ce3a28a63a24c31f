"""One request inside an instance: how far it is, which blocks it holds, what may happen to it next."""

from enum import StrEnum

from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, FinishReason, engine_priority
from mesh.errors import IllegalTransition, RequestRefused
from simulator.instance.config import InstanceConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.tokens import RequestTokens


class SequenceState(StrEnum):
    """The states of a request in an instance; `_NEXT` has the allowed transitions."""

    WAITING = "waiting"
    """In the queue: new, preempted, or imported with its KV."""
    IMPORTING = "importing"
    """Holds blocks into which KV from another instance, or from the host, is being written."""
    HOLDING = "holding"
    """Holds cached blocks of its prompt while peers read them; it never runs."""
    PAUSED = "paused"
    """Stands still with its KV, while it is handed off to another instance."""
    PREFILL = "prefill"
    """Runs; a part of its prompt is still to be computed."""
    DECODE = "decode"
    """Runs; one token a step."""
    ENDED = "ended"


_NEXT = {
    SequenceState.WAITING: {SequenceState.PREFILL, SequenceState.IMPORTING, SequenceState.ENDED},
    SequenceState.IMPORTING: {SequenceState.WAITING, SequenceState.ENDED},
    SequenceState.HOLDING: {SequenceState.ENDED},
    SequenceState.PREFILL: {SequenceState.DECODE, SequenceState.WAITING, SequenceState.ENDED},
    SequenceState.DECODE: {SequenceState.WAITING, SequenceState.PAUSED, SequenceState.ENDED},
    SequenceState.PAUSED: {SequenceState.WAITING, SequenceState.ENDED},
    SequenceState.ENDED: frozenset[SequenceState](),
}


class Sequence:
    """Mutable record of one request, owned by one `SimulatedInstance` and changed only by it and its parts."""

    __slots__ = (
        "arrival",
        "blocks",
        "cached_prompt_tokens",
        "computed_tokens",
        "decode_base",
        "finish_reason",
        "grows_cache",
        "growth_due",
        "hashed_blocks",
        "hashes",
        "join",
        "priority",
        "prompt_tokens",
        "queued_tokens",
        "reported_tokens",
        "request_id",
        "slot",
        "started",
        "state",
        "text",
        "tokens",
        "total_tokens",
    )

    def __init__(
        self, request_id: str, priority: int, prompt_tokens: int, emitted_tokens: int, output_tokens: int
    ) -> None:
        self.request_id = request_id
        self.priority = priority
        self.arrival = 0
        """Order of arrival at this instance; a preempted request keeps it."""
        self.prompt_tokens = prompt_tokens
        self.tokens = prompt_tokens + emitted_tokens
        """Prompt and generated tokens so far; while decoding, `DecodeBatch.tokens_of` is right instead."""
        self.total_tokens = prompt_tokens + output_tokens
        """Prompt and generated tokens at its end."""
        self.finish_reason = FinishReason.LENGTH
        self.state = SequenceState.WAITING
        self.computed_tokens = 0
        """Tokens whose KV is there; while decoding, all but the last."""
        self.blocks: list[int] = []
        self.hashed_blocks = 0
        """Leading blocks that were offered to the prefix cache."""
        self.hashes: list[int] = []
        self.text: RequestTokens | None = None
        self.cached_prompt_tokens: int | None = None
        """Prompt tokens found in the prefix cache at its first admission."""
        self.started = False
        """Its first token here is out."""
        self.reported_tokens = self.tokens
        """Tokens (prompt included) of which its deltas have told."""
        self.queued_tokens = 0
        """Its share of the queued prefill tokens."""
        self.slot = -1
        self.join = 0
        """Which joining of the decode batch was its last."""
        self.decode_base = 0
        self.growth_due = -1
        self.grows_cache = False
        """Blocks that it fills while decoding may be new to the prefix cache."""

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: the smallest is served first, the largest preempted first."""
        return (self.priority, self.arrival)

    def move_to(self, state: SequenceState) -> None:
        """Raises `IllegalTransition` for a step that the table does not have."""
        if state not in _NEXT[self.state]:
            raise IllegalTransition(f"{self.story()} cannot become {state}")
        self.state = state

    def story(self) -> str:
        """One line for error messages."""
        return (
            f"request {self.request_id} ({self.state}, priority {self.priority}, arrival {self.arrival}, "
            f"prompt {self.prompt_tokens}, tokens {self.tokens}/{self.total_tokens}, computed "
            f"{self.computed_tokens}, blocks {self.blocks})"
        )

    def hash_of_block(self, index: int, block_tokens: int) -> int | None:
        """Hash of its full block `index`; None where only lengths are known."""
        if index >= len(self.hashes) and self.text is not None:
            known = len(self.hashes)
            parent = self.hashes[-1] if self.hashes else self.text.root_hash
            fresh = self.text.between(known * block_tokens, (index + 1) * block_tokens)
            # The array stands for the sequence of ids; `block_hashes` turns lists into such arrays anyway.
            self.hashes += block_hashes(
                fresh,  # type: ignore[arg-type]
                block_tokens,
                parent,
                self.text.media,
                known * block_tokens,
            )
        return self.hashes[index] if index < len(self.hashes) else None


def sequence_of(request: EngineRequest, config: InstanceConfig) -> Sequence:
    """Raises `RequestRefused` for a request that the instance can never serve."""
    text = RequestTokens(request, config)
    sequence = Sequence(
        request.request_id,
        request.engine_priority,
        text.prompt_tokens,
        len(request.emitted_token_ids),
        text.script.total_tokens,
    )
    sequence.finish_reason = text.script.finish_reason
    sequence.text = text
    sequence.hashes = block_hashes(text.known, config.block_tokens, text.root_hash, text.media)  # type: ignore[arg-type]
    return sequence


def counted_sequence_of(request: CountedRequest, config: InstanceConfig) -> Sequence:
    """Raises `RequestRefused` for a request that the instance can never serve."""
    output_tokens = min(request.output_tokens, config.max_model_len_tokens - request.prompt_tokens)
    if request.prompt_tokens < 1 or not 0 <= request.emitted_tokens < output_tokens:
        raise RequestRefused(
            f"request {request.request_id}: {request.prompt_tokens} prompt, {request.emitted_tokens} emitted and "
            f"{request.output_tokens} output tokens leave nothing to do within the context length of "
            f"{config.max_model_len_tokens}"
        )
    sequence = Sequence(
        request.request_id,
        engine_priority(request.priority, request.turn),
        request.prompt_tokens,
        request.emitted_tokens,
        output_tokens,
    )
    sequence.hashes = list(request.block_hashes)
    return sequence
