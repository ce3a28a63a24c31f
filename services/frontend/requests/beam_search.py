"""Beam search as vLLM's server does it: one token of every beam at a time, each by a request of its own. Pure.

The beams share their prefix in the cache of the engines, so a step costs little more than the tokens that it tries.
Each step's requests are short, and are placed and recovered like any other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

MAX_BEAMS: Final = 10
"""Each asks for the logprobs of twice as many tokens, of which engines give 20."""


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer so far."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """Of all its tokens together."""
    is_ended: bool = False
    """By the end-of-sequence token, which is its last."""
    rivals: tuple[Sequence[tuple[int, float]], ...] = ()
    """By token of the answer: the likeliest tokens there with their logprobs, itself among them."""


class BeamSearch:
    """Of one prompt: ask for the tokens that may follow each of `beams`, and `take` them, until `is_done`."""

    def __init__(
        self,
        prompt_tokens: int,
        width: int,
        max_tokens: int,
        ending_token_ids: frozenset[int],
        length_penalty: float = 1.0,
    ) -> None:
        """`ending_token_ids` is empty where the end of sequence is to be ignored. `length_penalty`: a beam's score is
        its logprob, divided by its tokens, those of the prompt included, to the power of it."""
        self.beams: tuple[Beam, ...] = (Beam(),)
        """Those that go on."""
        self._ended: list[Beam] = []
        self._prompt_tokens = prompt_tokens
        self._width = width
        self._left = max_tokens
        self._ending_token_ids = ending_token_ids
        self._length_penalty = length_penalty

    @property
    def is_done(self) -> bool:
        """Whether no beam goes on, or none may."""
        return self._left == 0 or not self.beams

    def take(self, followers: Sequence[Sequence[tuple[int, float]]]) -> None:
        """The likeliest tokens behind each beam, with their logprobs."""
        assert len(followers) == len(self.beams), "one step of every beam"
        longer: list[Beam] = []
        for beam, tokens in zip(self.beams, followers, strict=True):
            for token_id, logprob in tokens:
                is_ended = token_id in self._ending_token_ids
                rivals = (*beam.rivals, tokens)
                grown = Beam((*beam.token_ids, token_id), beam.logprob + logprob, is_ended, rivals)
                (self._ended if is_ended else longer).append(grown)
        self._ended = self._best(self._ended)  # others can come to nothing any more
        self.beams = tuple(sorted(longer, key=lambda beam: -beam.logprob)[: self._width])
        self._left -= 1

    def best(self) -> list[Beam]:
        """The answers, best first."""
        return self._best([*self._ended, *self.beams])

    def _best(self, beams: Iterable[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self._width]

    def _score(self, beam: Beam) -> float:
        tokens = self._prompt_tokens + len(beam.token_ids) - beam.is_ended
        return beam.logprob / float(tokens**self._length_penalty)
