"""Which batches of which lengths a profile runs (CascadeInfer, section 4.1). Pure."""

from dataclasses import dataclass

import msgspec
import numpy as np

from controlplane.planning.instance_profile import InstanceSizes
from mesh.errors import ConfigurationError


class ProfileBounds(msgspec.Struct, frozen=True):
    """How far and how long a profile goes."""

    shortest_tokens: int = 64
    """Of prompt and answer together; buckets double from here."""
    longest_tokens: int = 8192
    largest_batch: int = 64
    most_answer_tokens: int = 64
    seconds: float = 4.0
    """Duration of each configuration."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 8 <= self.shortest_tokens < self.longest_tokens:
            raise ConfigurationError(
                f"lengths from {self.shortest_tokens} to {self.longest_tokens} tokens: the shortest must be at least "
                "8 and below the longest"
            )
        if self.largest_batch < 1 or self.most_answer_tokens < 2 or self.seconds <= 0:
            raise ConfigurationError("the batch is at least 1, an answer at least 2 tokens and a time above 0 s")


class Configuration(msgspec.Struct, frozen=True):
    """One length bucket at one batch size."""

    shortest_tokens: int
    """Shortest total of prompt and answer."""
    below_tokens: int
    batch: int
    longest_tokens: int = 0
    """Of one request of the batch, whatever the bucket; 0: there is none like that."""


class UnevenPair(msgspec.Struct, frozen=True):
    """Two batches of the same size and total: one of equal lengths, one in which one request has half of the tokens."""

    even: Configuration
    uneven: Configuration


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and answer length of one request."""

    prompt_tokens: int
    answer_tokens: int


def configurations(bounds: ProfileBounds, sizes: InstanceSizes) -> tuple[Configuration, ...]:
    """Buckets [s, 2 s), [2 s, 4 s)... and for each the batch sizes 1, 2, 4... that memory holds.

    Raises `ConfigurationError` where the instance holds not even the shortest.
    """
    longest = min(bounds.longest_tokens, sizes.max_model_len_tokens, sizes.kv_tokens)
    largest_batch = min(bounds.largest_batch, sizes.max_batch_requests)
    planned: list[Configuration] = []
    shortest = bounds.shortest_tokens
    while shortest < longest:
        below = min(2 * shortest, longest + 1)
        batch = 1
        while batch <= largest_batch and batch * below <= sizes.kv_tokens:
            planned.append(Configuration(shortest, below, batch))
            batch *= 2
        shortest *= 2
    if not planned:
        raise ConfigurationError(
            f"the instance holds {longest} tokens of a request: too few for one of {bounds.shortest_tokens}"
        )
    return tuple(planned)


def uneven_pairs(bounds: ProfileBounds, sizes: InstanceSizes) -> tuple[UnevenPair, ...]:
    """For batches of 4, 16, 64... as far as the others of the batch are no shorter than the shortest bucket's half."""
    longest = min(bounds.longest_tokens, sizes.max_model_len_tokens, sizes.kv_tokens // 2)
    pairs: list[UnevenPair] = []
    batch = 4
    while batch <= min(bounds.largest_batch, sizes.max_batch_requests):
        mean, short = 2 * longest // batch, longest // (batch - 1)
        if 2 * short < bounds.shortest_tokens:
            break
        uneven = Configuration(short, short + 1, batch, longest_tokens=longest)
        pairs.append(UnevenPair(Configuration(mean, mean + 1, batch), uneven))
        batch *= 4
    return tuple(pairs)


def draw_lengths(
    configuration: Configuration, bounds: ProfileBounds, rng: np.random.Generator, *, is_longest: bool = False
) -> Lengths:
    """Draw a request of a configuration: its total length anywhere in the bucket, a tenth to a half of it the answer,
    within the bounds. Where all are equally long, as in an `UnevenPair`, answers are as long as the bounds allow, so
    that most steps decode the whole batch. `is_longest`: the one that has `longest_tokens`."""
    total = int(rng.integers(configuration.shortest_tokens, configuration.below_tokens))
    total = configuration.longest_tokens if is_longest else total
    is_pair = configuration.below_tokens == configuration.shortest_tokens + 1
    answer = int(total * (0.5 if is_pair else rng.uniform(0.1, 0.5)))
    answer = min(max(2, answer), bounds.most_answer_tokens)
    return Lengths(total - answer, answer)
