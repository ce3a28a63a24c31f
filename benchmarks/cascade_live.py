"""A cascade of the demo models on a running mesh against the large model alone, with thresholds that the planner chose.

Start the mesh and profile its instances first:

    penstock up --model demo-small:1 --model demo-medium:1 --model demo-large:1 &
    for tier in small medium large; do
        penstock profile --model demo-$tier --out $tier.json --largest-batch 8 --longest 1024 --seconds 2
    done
    python -m benchmarks.cascade_live --profiles small.json medium.json large.json --json cascade.json

Calibration and test prompts are of disjoint splits. Scores are the models' own confidence; how good an answer is, an
exact check says. Every block of test prompts goes through the large model alone and through the cascade, in turn, so
that both see the same machine.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from controlplane.model.cascade_goal import Minimise
from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.bilevel import PlanRequest, PlanResult, plan
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.protocols.cascade.confidence import ScoreBound, confidence_of
from demo.tasks import Task, check, generate
from mesh.errors import PlanInfeasible
from penstock.v1 import cascade_pb2, cascade_pb2_grpc
from services.cli.connection import call, mesh_directory, mesh_store, only_member
from services.cli.profiling.profile_file import read_profile
from simulator.cascade.curves import SimulatedCurves
from simulator.cascade.profiled import ProfiledTier

TIERS = ("demo-small", "demo-medium", "demo-large")
NAME = "benchmark-cascade"
BLOCK_TASKS = 20
CALIBRATION_CONCURRENCY = 8
MAX_TOKENS = 512
UNJUDGED = (ScoreBound(1, 0.0),)
"""An answer without a token is escalated."""
TIMEOUT_S = 120.0
FOLLOWED_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a model or of the cascade, checked, with its latency."""

    is_right: bool
    seconds: float
    input_tokens: int
    output_tokens: int
    score_bounds: tuple[ScoreBound, ...]
    """Upper bounds of its confidence while it was generated."""
    tier: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a plan reached for one quality target, beside the largest model alone."""

    target: float
    expected: float
    """Quality that the plan expects, on the calibration prompts."""
    thresholds: tuple[float, ...]
    quality: float
    """Share of right answers on the test prompts, 0 to 100."""
    quality_large: float
    latency_s: float
    """Mean over the test prompts."""
    latency_large_s: float
    throughput_per_s: float
    throughput_large_per_s: float
    shares: dict[str, float]
    """Of the answers, by the tier that gave them."""
    tests: int


class Endpoint:
    """Sends tasks to an OpenAI-compatible endpoint, at most `concurrency` at a time."""

    def __init__(self, url: str, concurrency: int) -> None:
        self.concurrency = concurrency
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        self._turns = asyncio.Semaphore(concurrency)

    async def answers(self, model: str, tasks: Sequence[Task], logprobs: bool = False) -> list[Answer]:
        """Answers to all tasks, in their order."""
        return list(await asyncio.gather(*(self._answer(model, task, logprobs) for task in tasks)))

    async def models(self) -> set[str]:
        """Names of the models that can be asked for."""
        return {model["id"] for model in (await self._client.get("/v1/models")).json()["data"]}

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(self, model: str, task: Task, logprobs: bool) -> Answer:
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": task.prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "logprobs": logprobs,
        }
        async with self._turns:
            began_s = time.perf_counter()
            response = await self._client.post("/v1/chat/completions", json=body)
            seconds = time.perf_counter() - began_s
        response.raise_for_status()
        answer = response.json()
        choice, usage = answer["choices"][0], answer["usage"]
        chosen = [each["logprob"] for each in (choice["logprobs"] or {}).get("content", [])]
        return Answer(
            is_right=check(task, choice["message"]["content"]),
            seconds=seconds,
            input_tokens=usage["prompt_tokens"],
            output_tokens=max(1, usage["completion_tokens"]),
            score_bounds=tuple(confidence_of(chosen).score_bounds) if chosen else UNJUDGED,
            tier=answer.get("penstock", {}).get("tier", model),
        )


async def calibrate(endpoint: Endpoint, tasks: Sequence[Task], rate_per_s: float) -> CascadeSample:
    """Have every tier answer every task; returns a sample with confidences as scores and the truth as quality."""
    by_tier = [await endpoint.answers(tier, tasks, logprobs=True) for tier in TIERS]
    return CascadeSample(
        scores=np.array([[score_of(answer) for answer in answers] for answers in by_tier]).T,
        input_tokens=np.array([answer.input_tokens for answer in by_tier[0]], np.int64),
        output_tokens=np.array([[answer.output_tokens for answer in answers] for answers in by_tier], np.int64).T,
        rate_per_s=rate_per_s,
        quality=np.array([[100.0 * answer.is_right for answer in answers] for answers in by_tier]).T,
        score_bounds=tuple(tuple(answer.score_bounds for answer in answers) for answers in zip(*by_tier, strict=True)),
    )


def score_of(answer: Answer) -> float:
    """The answer's confidence at its end, 0 to 100."""
    return answer.score_bounds[-1].score if answer.score_bounds else MAX_SCORE


@asynccontextmanager
async def in_force(endpoint: Endpoint, name: str, planned: PlanResult, mesh: str) -> AsyncIterator[None]:
    """The thresholds, from when the frontend has them: a name of its own for each plan tells."""
    cascade = cascade_pb2.CascadeDescription(
        name=name, tiers=TIERS, thresholds=planned.thresholds, judges=["confidence"]
    )
    stub = cascade_pb2_grpc.CascadeStub
    async with mesh_store(None, mesh) as store, mesh_directory(store) as directory:
        router = only_member(directory, "cascade")
        await call(router, stub, "SetCascade", cascade_pb2.SetCascadeRequest(cascade=cascade))
        async with asyncio.timeout(FOLLOWED_TIMEOUT_S):
            while name not in await endpoint.models():  # noqa: ASYNC110 - another process follows
                await asyncio.sleep(0.1)
        try:
            yield
        finally:
            await call(router, stub, "RemoveCascade", cascade_pb2.RemoveCascadeRequest(name=name))


async def compare(endpoint: Endpoint, name: str, tasks: Sequence[Task], target: float, planned: PlanResult) -> Result:
    """Blocks in turn, the first of a block by turns too."""
    answers: dict[str, list[Answer]] = {name: [], TIERS[-1]: []}
    seconds = {name: 0.0, TIERS[-1]: 0.0}
    size = max(BLOCK_TASKS, 4 * endpoint.concurrency)
    blocks = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    for number, block in enumerate(blocks):
        for model in (name, TIERS[-1]) if number % 2 else (TIERS[-1], name):
            began_s = time.perf_counter()
            answers[model] += await endpoint.answers(model, block)
            seconds[model] += time.perf_counter() - began_s
    ours, large = answers[name], answers[TIERS[-1]]
    return Result(
        target=target,
        expected=planned.routed.quality,
        thresholds=planned.thresholds,
        quality=100 * statistics.fmean(answer.is_right for answer in ours),
        quality_large=100 * statistics.fmean(answer.is_right for answer in large),
        latency_s=statistics.fmean(answer.seconds for answer in ours),
        latency_large_s=statistics.fmean(answer.seconds for answer in large),
        throughput_per_s=len(tasks) / seconds[name],
        throughput_large_per_s=len(tasks) / seconds[TIERS[-1]],
        shares={tier: statistics.fmean(answer.tier == tier for answer in ours) for tier in TIERS},
        tests=len(tasks),
    )


async def run(arguments: argparse.Namespace) -> list[Result]:
    """Calibrate once, then plan and compare for each target."""
    endpoint = Endpoint(arguments.url, arguments.concurrency)
    try:
        calibration = generate(arguments.seed, arguments.calibrate, split="calibration")
        calibrating = Endpoint(arguments.url, CALIBRATION_CONCURRENCY)
        sample = await calibrate(calibrating, calibration, arguments.rate)
        await calibrating.close()
        say(
            f"calibrated on {sample.requests} prompts: {np.round(sample.true_quality.mean(axis=0), 1).tolist()} % right"
        )
        tiers = [ProfiledTier((read_profile(path),)) for path in arguments.profiles]
        curves = SimulatedCurves(sample, tiers, seed=arguments.seed)
        tests = generate(arguments.seed + 1, arguments.test, split="test")
        results: list[Result] = []
        for target in arguments.quality:
            try:
                planned = plan(sample, curves, _request(target, arguments.minimise))
            except PlanInfeasible as error:
                say(f"quality {target:g}: {error}")
                continue
            written = sample.tokens(0, planned.thresholds[0]).mean()
            say(f"{TIERS[0]} writes {written:.1f} tokens an answer instead of {sample.output_tokens[:, 0].mean():.1f}")
            name = f"{NAME}-{arguments.seed}-{target:g}"
            async with in_force(endpoint, name, planned, arguments.mesh):
                results.append(await compare(endpoint, name, tests, target, planned))
            say(json.dumps(asdict(results[-1])))
        return results
    finally:
        await endpoint.close()


def _request(target: float, minimise: str) -> PlanRequest:
    """Confidence is at hand with the answer: judging takes no time."""
    kind: Minimise = "end_to_end" if minimise == "end-to-end" else "slowest_tier"
    return PlanRequest(gpus=len(TIERS), quality=target, judge_s=0.0, minimise=kind)


def say(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--mesh", default="default")
    parser.add_argument("--profiles", type=Path, nargs=3, required=True, help="of the small, medium and large model")
    parser.add_argument("--quality", type=float, nargs="+", default=[60.0, 70.0, 80.0])
    parser.add_argument("--calibrate", type=int, default=600)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=1, help="requests under way in the comparison")
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s that the plan is made for")
    parser.add_argument(
        "--minimise",
        choices=["slowest-tier", "end-to-end"],
        default="end-to-end",
        help="p95 of the slowest tier, or the mean time of a request over all its tiers, as measured here",
    )
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments))
    document = (
        json.dumps({"minimise": arguments.minimise, "results": [asdict(result) for result in results]}, indent=2) + "\n"
    )
    if arguments.json is not None:
        arguments.json.write_text(document)
    print(document, end="")


if __name__ == "__main__":
    main()
