"""A live cascade whose large model costs five times the small one's step, beside the large model alone on as many GPUs.

    python -m benchmarks.cascade_at_load --data DATA [--under-way 1 8 32] [--rounds 5] [--json OUT]

`penstock up` with real processes: frontend, scheduler, monitor, cascade router and workers. The cascade has four
instances of the small model (a GPU each) and one of the large (four GPUs); the rival two of the large. What they
generate takes the time of a step that is set here: engines are simulated, in real time, and say words without meaning.
So how good an answer is comes from a record: RouteLLM's GSM8K in DATA/quality, for each of 1,319 prompts whether
Mixtral-8x7B (the small one) and GPT-4 (the large one) were right, and how long their answers were (half of it here, to
save time). That record has no scores, so the judge is made up: it takes `--judge-s`, and tells right from wrong with an
area under the curve of 0.8, as in `benchmarks.quality_promise`. Thresholds are planned to hold `--quality` with 95 %,
by 600 prompts that are not asked afterwards.

In each round the same prompts go all ways, one after the other, another one first each time: the large model alone, the
cascade, and the cascade that begins its second tier ahead (`--speculate`). As many clients as are under way ask one
question after the other. No prompt is sent twice: each begins with its way and round, or the second way on the same
instances would find all prefixes cached by the first (at 32 under way, 30 % of its latency).
"""

import argparse
import asyncio
import csv
import gzip
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import httpx
import numpy as np

from benchmarks.quality_promise import ClosedFormSource, checked_answers
from benchmarks.rescheduling_live import until_serving
from controlplane.model.request import EngineRequest
from controlplane.planning.cascade.bilevel import PlanRequest
from controlplane.planning.cascade.promise import plan_with_promise
from demo.tokenizer import MODELS_DIR
from engine_worker.engines.interface import Engine, EngineContext, EngineFactory
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.vocabulary import read_vocabulary
from mesh.errors import ConfigurationError, JudgeUnavailable
from mesh.parent_death import PARENT_VARIABLE
from mesh.run_file import run_dir
from services.cascade.judges.interface import Judge, JudgeContext, JudgedAnswer, JudgeFactory
from services.cli.chaos.temporary_mesh import free_ports
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig, OutputConfig
from simulator.report.interval import half_interval

SMALL, LARGE, ALONE = "small", "large", "large-alone"
TOKENIZERS = {SMALL: "demo-small", LARGE: "demo-large", ALONE: "demo-large"}
"""No weights are read."""
INSTANCES = (4, 1, 2)
STEP_MS = {"demo-small": 10.0, "demo-large": 50.0}
REQUEST_STEP_MS = {"demo-small": 0.1, "demo-large": 0.5}
"""Of a step, for each request in its batch."""
PREFILL_TOKEN_MS = {"demo-small": 0.1, "demo-large": 0.5}
CHARACTERS_PER_TOKEN = 7
"""About 3.5, and answers of half their length."""
CALIBRATED = 600
PROBABILITY = 95.0
RECORD_VARIABLE = "PENSTOCK_BENCHMARK_RECORD"
"""The file that the engines and the judge of the mesh read: see `Record`."""
QUESTION = re.compile(r"Question (\d+)\.")
WAYS = ("large alone", "cascade", "speculative")
PENSTOCK = (sys.executable, "-m", "services.cli.main")
START_S = 600.0
REQUEST_S = 300.0
ENTRY_POINTS = """
[penstock.engines]
recorded = benchmarks.cascade_at_load:ENGINE

[penstock.judges]
recorded = benchmarks.cascade_at_load:JUDGE
"""


@dataclass(frozen=True, slots=True)
class Record:
    """Of all questions, by number."""

    answer_tokens: dict[str, list[int]]
    """By tokenizer."""
    scores: list[float]
    """Of the small model's answers."""
    judge_s: float
    time_scale: float
    """Multiplies the times of steps and judgements."""


@cache
def record() -> Record:
    """As `RECORD_VARIABLE` names it."""
    return Record(**json.loads(Path(os.environ[RECORD_VARIABLE]).read_text()))


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """There is nothing to set."""


class RecordedEngine(SimulatedEngine):
    """A simulated engine whose answers are as long as recorded: the question's number is the request's seed."""

    tokenizer = ""

    def submit(self, request: EngineRequest) -> None:
        assert request.sampling.seed is not None, "the benchmark's clients send it"
        tokens = record().answer_tokens[self.tokenizer][request.sampling.seed]
        super().submit(replace(request, sampling=replace(request.sampling, max_tokens=tokens, ignore_eos=True)))


def make_engine(settings: RecordedSettings, context: EngineContext) -> Engine:
    """Raises `ConfigurationError` for another model than those of the benchmark."""
    name = Path(context.model_path).name
    vocabulary = read_vocabulary(Path(context.model_path))
    if vocabulary is None or name not in STEP_MS:
        raise ConfigurationError(f"{context.model_path} has no step times here; take one of {', '.join(STEP_MS)}")
    output = OutputConfig(
        vocabulary_tokens=vocabulary.size_tokens,
        first_token_id=vocabulary.first_token_id,
        last_token_id=vocabulary.last_token_id,
        eos_token_id=vocabulary.eos_token_id,
        byte_token_ids=tuple(vocabulary.byte_token_ids),
        word_token_ids=tuple(vocabulary.word_token_ids),
    )
    cost = LinearCost(STEP_MS[name], PREFILL_TOKEN_MS[name], REQUEST_STEP_MS[name], 0.0, 0.0)
    engine = RecordedEngine(InstanceConfig(output=output), cost, context.clock, time_scale=record().time_scale)
    engine.tokenizer = name
    return engine


class RecordedJudge:
    """Says the recorded score of the question that a prompt names."""

    name = "recorded"

    async def score(self, judged: JudgedAnswer) -> float:
        found = QUESTION.search(judged.prompt)
        if found is None:
            raise JudgeUnavailable("the prompt is no question of the record")
        await asyncio.sleep(record().judge_s * record().time_scale)
        return record().scores[int(found[1])]

    async def close(self) -> None:
        """Nothing to free."""


def make_judge(argument: str, context: JudgeContext) -> Judge:
    """It takes no argument."""
    return RecordedJudge()


ENGINE = EngineFactory(RecordedSettings, make_engine, device=lambda: "recorded", needs_weights=False)
JUDGE = JudgeFactory(make_judge, "recorded")


@dataclass(frozen=True, slots=True)
class Questions:
    """What was recorded, and the thresholds that were planned from a part of it."""

    is_right: dict[str, list[bool]]
    prompt_characters: list[int]
    thresholds: tuple[float, ...]
    expected: float
    """Quality on the prompts that the plan was tested by."""
    asked: list[int]
    """Questions that no plan was made from, in random order."""
    record: Record


def questions(file: Path, quality: float, judge_s: float, time_scale: float, seed: int) -> Questions:
    """Raises `PlanInfeasible` for a quality that cannot be promised."""
    sample = checked_answers(file)
    with gzip.open(file, "rt", newline="") as lines:
        rows = list(csv.DictReader(lines))
    shuffled = np.random.default_rng(seed).permutation(sample.requests)
    calibrating = min(CALIBRATED, sample.requests // 2)
    calibrated = sample.only(shuffled[:calibrating])
    request = PlanRequest(gpus=8, quality=quality, judge_s=judge_s, minimise="end_to_end")
    planned, promise = plan_with_promise(calibrated, ClosedFormSource(calibrated), request, PROBABILITY, seed)
    tokens = {
        tokenizer: [max(2, round(float(row[column]) / CHARACTERS_PER_TOKEN)) for row in rows]
        for tokenizer, column in (
            ("demo-small", "mixtral_8x7b_response_chars"),
            ("demo-large", "gpt4_1106_response_chars"),
        )
    }
    return Questions(
        is_right={
            SMALL: [row["mixtral_8x7b_correct"] == "1" for row in rows],
            LARGE: [row["gpt4_1106_correct"] == "1" for row in rows],
        },
        prompt_characters=[int(float(row["prompt_chars"])) for row in rows],
        thresholds=planned.thresholds,
        expected=promise.tested,
        asked=shuffled[calibrating:].tolist(),
        record=Record(tokens, sample.scores[:, 0].tolist(), judge_s, time_scale),
    )


@asynccontextmanager
async def running_mesh(folder: Path, instances: Sequence[int]) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """(address of the endpoint, environment for `penstock` commands) of a mesh of its own, ended afterwards.

    `instances`: of the small model, of the large one in the cascade, and of the large one alone.
    """
    metadata = folder / "cascade_at_load-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cascade-at-load\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    name, port = f"cascade-{os.getpid()}", free_ports()
    path = os.pathsep.join(filter(None, (str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", ""))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        RECORD_VARIABLE: str(folder / "record.json"),
        PARENT_VARIABLE: str(os.getpid()),
    }
    command = [*PENSTOCK, "up", "--insecure", "--mesh", name, "--port", str(port), "--engine", "recorded"]
    for (model, source), count in zip(TOKENIZERS.items(), instances, strict=True):
        command += ["--model", f"{model}={MODELS_DIR / source}:{count}"]
    output_path = folder / "up.log"
    with output_path.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, "--ready-timeout-s", f"{START_S:g}", stdout=output, stderr=output, env=environment
        )
    try:
        await until_serving(process, output_path.read_text)
        yield f"http://127.0.0.1:{port}", {**environment, "PENSTOCK_MESH": name}
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()
        shutil.rmtree(run_dir() / name, ignore_errors=True)


async def set_cascade(
    url: str, environment: Mapping[str, str], name: str, thresholds: Sequence[float], speculate: float
) -> None:
    """Until the frontend has it."""
    command = [*PENSTOCK, "cascade", "set", name, "--mesh", environment["PENSTOCK_MESH"], "--judge", "recorded"]
    command += ["--tier", SMALL, "--tier", LARGE, "--speculate", f"{speculate:g}"]
    command += [word for threshold in thresholds for word in ("--threshold", repr(threshold))]
    process = await asyncio.create_subprocess_exec(*command, env=dict(environment), stdout=sys.stderr)
    if await process.wait():
        raise RuntimeError(f"{name} could not be set")
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(START_S):
        while name not in {model["id"] for model in (await client.get("/v1/models")).json()["data"]}:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one question."""

    is_right: bool
    seconds: float
    is_escalated: bool
    begun_ahead: int
    abandoned: int


@dataclass(frozen=True, slots=True)
class Round:
    """All questions of one round, one way."""

    way: str
    quality: float
    latency_s: float
    throughput_per_s: float
    escalated: float
    begun_ahead: float
    abandoned: float


@dataclass(frozen=True, slots=True)
class Result:
    """One way with so many requests under way: means over the rounds, and ratios to the large model alone in the same
    round with half of their 95 % interval (Student's t)."""

    under_way: int
    way: str
    requests: int
    quality: float
    latency_s: float
    throughput_per_s: float
    latency_ratio: float
    latency_ratio_half: float
    throughput_ratio: float
    throughput_ratio_half: float
    escalated: float
    begun_ahead: float
    abandoned: float


async def ask(client: httpx.AsyncClient, model: str, number: int, asked: Questions, heading: str) -> Answer:
    """Ask one question under a heading that no other prompt has with it."""
    text = f"{heading}. Question {number}. " + "x " * (asked.prompt_characters[number] // 2)
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "seed": number}
    began_s = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - began_s
    response.raise_for_status()
    told = response.json().get("penstock", {})
    tiers = told.get("tiers", [])
    answered_by = SMALL if told.get("tier") == SMALL else LARGE
    return Answer(
        is_right=asked.is_right[answered_by][number],
        seconds=seconds,
        is_escalated=answered_by == LARGE,
        begun_ahead=sum(bool(tier.get("begun_ahead") or tier.get("abandoned")) for tier in tiers),
        abandoned=sum(bool(tier.get("abandoned")) for tier in tiers),
    )


async def one_round(
    url: str, way: str, model: str, numbers: Sequence[int], asked: Questions, under_way: int, heading: str
) -> Round:
    """So many clients, each of which asks one question after the other."""
    left: Iterator[int] = iter(numbers)
    answers: list[Answer] = []

    async def client_of(client: httpx.AsyncClient) -> None:
        for number in left:
            answers.append(await ask(client, model, number, asked, heading))

    limits = httpx.Limits(max_connections=under_way)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits) as client:
        began_s = time.perf_counter()
        await asyncio.gather(*(client_of(client) for _ in range(under_way)))
        seconds = time.perf_counter() - began_s
    return Round(
        way,
        100 * statistics.fmean(each.is_right for each in answers),
        statistics.fmean(each.seconds for each in answers),
        len(answers) / seconds,
        statistics.fmean(each.is_escalated for each in answers),
        statistics.fmean(each.begun_ahead for each in answers),
        statistics.fmean(each.abandoned for each in answers),
    )


async def run(arguments: argparse.Namespace) -> list[Result]:
    """All ways with each number of requests under way, on one mesh."""
    file = arguments.data / "quality" / "routellm_gsm8k.csv.gz"
    asked = questions(file, arguments.quality, arguments.judge_s, arguments.time_scale, arguments.seed)
    say(f"threshold {asked.thresholds[0]:.1f}, quality {asked.expected:.1f} on the prompts that tested it")
    alone_s, cascade_s = by_steps(asked)
    say(f"by the times of steps and judgements, one at a time: {alone_s:.2f} s alone, {cascade_s:.2f} s in the cascade")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "record.json").write_text(json.dumps(asdict(asked.record)))
        async with running_mesh(Path(folder), arguments.instances) as (url, environment):
            for name, p in (("cascade", 0.0), ("speculative", arguments.speculate)):
                await set_cascade(url, environment, name, asked.thresholds, p)
            models = {"large alone": ALONE, "cascade": "cascade", "speculative": "speculative"}
            for under_way in arguments.under_way:
                rounds = await rounds_of(url, models, asked, under_way, arguments)
                results += [result(under_way, rounds[way], rounds["large alone"], arguments) for way in WAYS]
                for each in results[-len(WAYS) :]:
                    say(json.dumps(asdict(each)))
    return results


def by_steps(asked: Questions) -> tuple[float, float]:
    """Mean seconds of an answer of the large model, and of the cascade: nothing but steps and judgements."""

    def answer_s(tokenizer: str, number: int) -> float:
        step_ms = STEP_MS[tokenizer] + REQUEST_STEP_MS[tokenizer]
        return asked.record.answer_tokens[tokenizer][number] * step_ms / 1000

    large_s = [answer_s(TOKENIZERS[LARGE], number) for number in asked.asked]
    small_s = [answer_s(TOKENIZERS[SMALL], number) + asked.record.judge_s for number in asked.asked]
    is_escalated = [asked.record.scores[number] < asked.thresholds[0] for number in asked.asked]
    in_cascade_s = [
        small + large * escalated for small, large, escalated in zip(small_s, large_s, is_escalated, strict=True)
    ]
    scale = asked.record.time_scale
    return scale * statistics.fmean(large_s), scale * statistics.fmean(in_cascade_s)


async def rounds_of(
    url: str, models: Mapping[str, str], asked: Questions, under_way: int, arguments: argparse.Namespace
) -> dict[str, list[Round]]:
    """By way. One round before the first is not counted: connections are made, and odds of an escalation learnt."""
    each = arguments.requests or max(12, 6 * under_way)
    rng = np.random.default_rng((arguments.seed, under_way))
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    for number in range(-1, arguments.rounds):
        numbers = rng.choice(asked.asked, each, replace=False).tolist()
        first = number % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            if number < 0 and way != "speculative":
                continue
            heading = f"{under_way} under way, round {number + 1}, {way}"
            found = await one_round(url, way, models[way], numbers, asked, under_way, heading)
            if number >= 0:
                rounds[way].append(found)
                say(f"{under_way} under way, round {number + 1}: {found}")
    return rounds


def result(under_way: int, ours: Sequence[Round], alone: Sequence[Round], arguments: argparse.Namespace) -> Result:
    """Of one way."""
    latency = [one.latency_s / other.latency_s for one, other in zip(ours, alone, strict=True)]
    throughput = [one.throughput_per_s / other.throughput_per_s for one, other in zip(ours, alone, strict=True)]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in ours)

    return Result(
        under_way=under_way,
        way=ours[0].way,
        requests=len(ours) * (arguments.requests or max(12, 6 * under_way)),
        quality=mean("quality"),
        latency_s=mean("latency_s"),
        throughput_per_s=mean("throughput_per_s"),
        latency_ratio=statistics.fmean(latency),
        latency_ratio_half=half_interval(latency),
        throughput_ratio=statistics.fmean(throughput),
        throughput_ratio_half=half_interval(throughput),
        escalated=mean("escalated"),
        begun_ahead=mean("begun_ahead"),
        abandoned=mean("abandoned"),
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """Lines of Markdown."""
    yield (
        "| under way | way | quality | mean latency | of large alone's | requests/s | of large alone's | escalated | "
        "begun ahead |"
    )
    yield "|--:|---|--:|--:|--:|--:|--:|--:|--:|"
    for each in results:
        yield (
            f"| {each.under_way} | {each.way} | {each.quality:.1f} | {each.latency_s:.2f} s | "
            f"{each.latency_ratio:.2f} ± {each.latency_ratio_half:.2f} | {each.throughput_per_s:.2f} | "
            f"{each.throughput_ratio:.2f} ± {each.throughput_ratio_half:.2f} | {100 * each.escalated:.0f} % | "
            f"{100 * each.begun_ahead:.0f} %, {100 * each.abandoned:.0f} % in vain |"
        )


def say(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of shared data, with quality/ in it")
    parser.add_argument("--under-way", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=0, help="of a round; default: 12, or 6 for each under way")
    parser.add_argument("--quality", type=float, default=80.0, help="that the plan holds with 95 %%")
    parser.add_argument("--judge-s", type=float, default=0.3)
    parser.add_argument("--speculate", type=float, default=0.5, help="as of `penstock cascade set`")
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        help="of steps and judgements; 4: four times as slow, on a busy machine",
    )
    parser.add_argument(
        "--instances", type=int, nargs=3, default=INSTANCES, help="of the small, the large and the large model alone"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments))
    document = {
        "step_ms": STEP_MS,
        "time_scale": arguments.time_scale,
        "quality": arguments.quality,
        "results": [asdict(each) for each in results],
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
