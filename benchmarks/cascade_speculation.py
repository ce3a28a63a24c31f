"""Speculative start in a simulated cascade: the same requests with it, without it, and through the large model alone.

    python -m benchmarks.cascade_speculation [--requests 600] [--seeds 5] [--json OUT]

Eight modelled H100s: four instances of Llama-3.1-8B and one of Llama-3.3-70B over four GPUs in the cascade; two of the
latter alone. Instances are simulated step by step, and each request is driven by the state machine and the odds that a
frontend drives it by; as many clients as are under way ask one question after the other. Answers are made up, and so is
how telling the small model's token probabilities are: three answers in five of the small model and nine in ten of the
large one are right, a judge that takes half a second tells right from wrong in nine cases of ten, and four in five of
wrong answers are unsure ones. So quality compares the ways with each other, not with any model.
"""

import argparse
import heapq
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from controlplane.model.cascade_record import SPECULATE_ROOM
from controlplane.protocols.cascade.escalation_odds import UNBEGUN, EscalationOdds, Progress, progress_of
from controlplane.protocols.cascade.state_machine import (
    Abandon,
    Accept,
    Answered,
    Begin,
    CascadeStateMachine,
    Doubted,
    Event,
    Generate,
    Judge,
    Judged,
    Speculate,
)
from controlplane.protocols.cascade.terms import CascadeTerms
from simulator.cascade.tier import TierModel
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance

SMALL, LARGE = 0, 1
GPUS: Final = (1, 4)
MODELS: Final = ("Llama-3.1-8B", "Llama-3.3-70B")
CONCURRENCIES: Final = (1, 8, 32)
JUDGE_MS: Final = 500.0
THRESHOLD: Final = 50.0
SPECULATE_FROM: Final = 0.7
PROMPT_TOKENS: Final = 400


@dataclass(frozen=True, slots=True)
class Question:
    """What both models would answer, and what would be said of it."""

    is_right: tuple[bool, bool]
    output_tokens: tuple[int, int]
    confidence: float
    """Of the small model in its own answer, at any place of it; 0 to 100."""
    score: float
    """The judge's, of the small model's answer."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of all requests of one run."""

    way: str
    under_way: int
    mean_latency_s: float
    throughput_per_s: float
    quality: float
    escalated: float
    """Share of the requests."""
    begun_ahead: float
    abandoned: float
    wasted_token_share: float
    """Tokens of abandoned answers among all that the large model generated."""


def questions(total: int, seed: int) -> list[Question]:
    """Drawn alike for every way."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(total):
        right = bool(rng.random() < 0.6), bool(rng.random() < 0.9)
        unsure = rng.random() < (0.1 if right[SMALL] else 0.8)
        told = right[SMALL] == (rng.random() < 0.9)
        drawn.append(
            Question(
                right,
                (int(rng.integers(100, 400)), int(rng.integers(100, 400))),
                float(rng.uniform(60, 85) if unsure else rng.uniform(90, 99.9)),
                float(rng.uniform(51, 99) if told else rng.uniform(1, 49)),
            )
        )
    return drawn


@dataclass(slots=True)
class Client:
    """One request on its way."""

    number: int
    question: Question
    machine: CascadeStateMachine
    began_ms: float
    passed: set[Progress] = field(default_factory=set)
    ahead: str | None = None
    """The request begun ahead, as long as it is neither claimed nor abandoned."""
    ahead_is_done: bool = False


class Run:
    """One way of serving all questions, in virtual milliseconds."""

    def __init__(self, drawn: list[Question], under_way: int, way: str) -> None:
        self._way, self._under_way = way, under_way
        counts = (0, 2) if way == "large alone" else (4, 1)
        self._instances = [[_instance(tier) for _ in range(counts[tier])] for tier in (SMALL, LARGE)]
        thresholds = 101.0 if way == "large alone" else THRESHOLD
        speculate_from = SPECULATE_FROM if way == "speculative" else 0.0
        self._terms = CascadeTerms((thresholds,), (0.0, 0.0), speculate_from=speculate_from)
        self._odds = EscalationOdds()
        self._left: Iterator[tuple[int, Question]] = iter(enumerate(drawn))
        self._events: list[tuple[float, int, object]] = []
        self._order = count()
        self._requests: dict[str, tuple[Client, int, SimulatedInstance]] = {}
        self._now_ms = 0.0
        self._latencies_ms: list[float] = []
        self._right = self._escalated = self._begun_ahead = self._abandoned = 0
        self._wasted_tokens = self._large_tokens = 0

    def result(self) -> Result:
        """Serve them all."""
        for _ in range(self._under_way):
            self._next_client()
        while self._events:
            self._now_ms, _, what = heapq.heappop(self._events)
            if isinstance(what, SimulatedInstance):
                self._end_step(what)
            else:
                assert isinstance(what, Client)
                self._handle(what, Judged(SMALL, what.question.score))
        total = len(self._latencies_ms)
        return Result(
            self._way,
            self._under_way,
            sum(self._latencies_ms) / total / 1000,
            1000 * total / self._now_ms,
            100 * self._right / total,
            self._escalated / total,
            self._begun_ahead / total,
            self._abandoned / total,
            self._wasted_tokens / max(1, self._large_tokens),
        )

    # -- inside

    def _next_client(self) -> None:
        found = next(self._left, None)
        if found is not None:
            client = Client(*found, CascadeStateMachine(str(found[0]), self._terms), self._now_ms)
            self._handle(client, Begin())

    def _handle(self, client: Client, event: Event) -> None:
        instructions = client.machine.handle(event, self._now_ms / 1000)
        client.machine.validate()
        if isinstance(event, Judged):
            self._odds.note(client.passed, escalated=not isinstance(instructions[-1], Accept))
        for instruction in instructions:
            match instruction:
                case Generate(tier):
                    self._escalated += tier == LARGE and self._way != "large alone"
                    self._generate(client, instruction)
                case Judge():
                    self._doubt(client, progress_of(0, client.question.confidence, is_whole=True))
                    heapq.heappush(self._events, (self._now_ms + JUDGE_MS, next(self._order), client))
                case Speculate(tier):
                    self._begun_ahead += 1
                    client.ahead = self._submit(client, tier)
                case Abandon():
                    self._abandon(client)
                case Accept(tier):
                    self._latencies_ms.append(self._now_ms - client.began_ms)
                    self._right += client.question.is_right[tier]
                    self._next_client()

    def _generate(self, client: Client, asking: Generate) -> None:
        if not asking.begun_ahead:
            self._submit(client, asking.tier)
            if asking.tier == SMALL:
                self._doubt(client, UNBEGUN)
            return
        client.ahead = None
        if client.ahead_is_done:
            self._handle(client, Answered(asking.tier))

    def _submit(self, client: Client, tier: int) -> str:
        instance = min(self._instances[tier], key=lambda each: len(each.request_ids))
        request_id = f"{client.number}-{tier}"
        instance.submit(CountedRequest(request_id, PROMPT_TOKENS, client.question.output_tokens[tier]))
        self._requests[request_id] = client, tier, instance
        self._plan(instance)
        return request_id

    def _abandon(self, client: Client) -> None:
        assert client.ahead is not None, "it was begun ahead"
        self._abandoned += 1
        tokens = client.question.output_tokens[LARGE]
        if not client.ahead_is_done:
            _, _, instance = self._requests.pop(client.ahead)
            decoding = {each.request_id: each.generated_tokens for each in instance.decoding_requests()}
            tokens = decoding.get(client.ahead, 0)
            instance.abort(client.ahead)
            self._large_tokens += tokens
        self._wasted_tokens += tokens
        client.ahead = None

    def _plan(self, instance: SimulatedInstance) -> None:
        if instance.planned is None:
            step = instance.plan_step(self._now_ms)
            if step is not None:
                heapq.heappush(self._events, (step.ends_ms, next(self._order), instance))

    def _end_step(self, instance: SimulatedInstance) -> None:
        assert instance.planned is not None, "steps end one by one"
        ended = instance.finish_step(instance.planned).finished
        for request_id in ended:
            client, tier, _ = self._requests.pop(request_id)
            self._large_tokens += client.question.output_tokens[tier] if tier == LARGE else 0
            if client.ahead == request_id:
                client.ahead_is_done = True
            else:
                self._handle(client, Answered(tier))
        if self._terms.speculate_from > 0 and instance in self._instances[SMALL]:
            for each in instance.decoding_requests():
                client, _, _ = self._requests[each.request_id]
                self._doubt(client, progress_of(each.generated_tokens, client.question.confidence))
        self._plan(instance)

    def _doubt(self, client: Client, progress: Progress) -> None:
        if self._terms.speculate_from <= 0 or progress in client.passed:
            return
        client.passed.add(progress)
        has_room = any(len(each.request_ids) < SPECULATE_ROOM for each in self._instances[LARGE])
        with_room = frozenset({LARGE}) if has_room else frozenset()
        self._handle(client, Doubted(SMALL, self._odds.p_escalates(progress), with_room))


def _instance(tier: int) -> SimulatedInstance:
    replicas = TierModel(MODELS[tier], "H100").replicas()
    replica = next(each for each in replicas if each.shape.gpus == GPUS[tier] and each.engines == 1)
    return SimulatedInstance(replica.engine, replica.cost)


def measured(requests: int, seeds: int) -> list[Result]:
    """Means over the seeds, each way with the same questions."""
    results = []
    for under_way in CONCURRENCIES:
        for way in ("large alone", "cascade", "speculative"):
            runs = [asdict(Run(questions(requests, seed), under_way, way).result()) for seed in range(seeds)]
            means = {name: float(np.mean([run[name] for run in runs])) for name in runs[0] if name != "way"}
            results.append(Result(way, under_way, **{k: v for k, v in means.items() if k != "under_way"}))
    return results


def main(arguments: list[str]) -> None:
    """Print a table, and write it as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = measured(options.requests, options.seeds)
    print("under way | way | mean latency s | requests/s | right % | escalated | ahead | abandoned | wasted tokens")
    for each in results:
        print(
            f"{each.under_way} | {each.way} | {each.mean_latency_s:.2f} | {each.throughput_per_s:.2f} | "
            f"{each.quality:.1f} | {each.escalated:.2f} | {each.begun_ahead:.2f} | {each.abandoned:.2f} | "
            f"{100 * each.wasted_token_share:.1f} %"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
