"""A policy, an engine and a judge that Penstock does not have; docs/plugins.md explains them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.interface import PolicyFactory
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest
from engine_worker.engines.interface import Engine, EngineContext, EngineFactory
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.vocabulary import read_vocabulary
from mesh.errors import ConfigurationError, JudgeUnavailable
from services.cascade.judges.interface import Judge, JudgeContext, JudgedAnswer, JudgeFactory
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig, OutputConfig


class FewestTokensParameters(PolicyParameters, frozen=True):
    """What operators may set, with default and bounds."""

    prefill_weight: Annotated[float, msgspec.Meta(ge=0)] = 2.0


class FewestTokens:
    """The instance with the fewest tokens to look after; a prompt token that is still to be computed counts more."""

    name: ClassVar[str] = "fewest_tokens"
    rule: ClassVar[str] = "score = running tokens + prefill_weight x prompt tokens to be computed"

    def __init__(self, parameters: FewestTokensParameters) -> None:
        self.parameters = parameters
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        """See `Policy`."""
        snapshot = problem.snapshot
        to_compute = snapshot.pending_prefill_tokens + problem.request.prompt_tokens - problem.cached_tokens
        tokens = snapshot.running_tokens + self.parameters.prefill_weight * to_compute
        scores = among_candidates(tokens, problem.candidates)
        turn = self._turns.next(snapshot.model)  # among equals, each in its turn
        return Decision(lowest(scores, turn), scores, {"running_tokens": snapshot.running_tokens})


POLICY = PolicyFactory(FewestTokens, FewestTokensParameters)


@dataclass(frozen=True, slots=True)
class PacedSettings:
    """Fields are set with `--engine-arg NAME=VALUE`."""

    step_ms: float = 10.0
    max_model_len_tokens: int = 8192


def make_paced(settings: PacedSettings, context: EngineContext) -> Engine:
    """Penstock's simulated engine, every step of which takes the same time."""
    vocabulary = read_vocabulary(Path(context.model_path))
    if vocabulary is None:
        raise ConfigurationError(f"{context.model_path} has no tokenizer.json; choose another model")
    output = OutputConfig(
        vocabulary_tokens=vocabulary.size_tokens,
        first_token_id=vocabulary.first_token_id,
        last_token_id=vocabulary.last_token_id,
        eos_token_id=vocabulary.eos_token_id,
    )
    config = InstanceConfig(max_model_len_tokens=settings.max_model_len_tokens, output=output)
    return SimulatedEngine(config, LinearCost(settings.step_ms, 0.0, 0.0, 0.0, 0.0), context.clock)


ENGINE = EngineFactory(PacedSettings, make_paced)


class LengthJudge:
    """100 for an answer of so many words or more, in proportion for a shorter one."""

    def __init__(self, words: int) -> None:
        self.name = f"length:{words}"
        self._words = words

    async def score(self, judged: JudgedAnswer) -> float:
        """See `Judge`."""
        if not judged.answer:
            raise JudgeUnavailable("there is no answer whose words could be counted")
        return min(100.0, 100.0 * len(judged.answer.split()) / self._words)

    async def close(self) -> None:
        """Nothing to free."""


def make_length(argument: str, context: JudgeContext) -> Judge:
    """From what stands behind the colon in `--judge length:50`."""
    if not argument.isdecimal() or int(argument) < 1:
        raise ConfigurationError(f"the judge 'length:{argument}' needs a number of words; write length:50")
    return LengthJudge(int(argument))


JUDGE = JudgeFactory(make_length, "length:WORDS")
