"""What vLLM's own parts beside a frontend cost: their start, their memory, and the CPU of a chat that they render.

    python -m benchmarks.vllm_parts [--rounds 5] [--chats 200] [--json OUT]

The process is the frontend's own (`services.parser`); this process stands for the frontend. Each round renders other
chats of English, first here (`plan_chat` with its chat template and tokenizer) and then there, one after the other. The
CPU is that of either process, user and system. A model of DeepSeek's mode stands for those that only vLLM renders.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from prometheus_client import CollectorRegistry

from benchmarks import english
from benchmarks.process_cpu import process_cpu_s
from mesh.runtime import SystemThreads, system_runtime
from penstock.v1 import parser_pb2
from services.frontend.metrics import FrontendMetrics
from services.frontend.parser_process.launcher import ModuleLauncher
from services.frontend.parser_process.process import ParserProcess
from services.frontend.parser_process.prompts import OutsidePrompts
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import plan_chat
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.text.model_text import ModelText
from tests.unit.services.frontend.checkpoints import LLAMA_3_REGEX, write_checkpoint

CHARACTERS = (1_000, 8_000, 32_000)
CONTEXT_TOKENS = 131_072
MODE = "deepseek_v32"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": CONTEXT_TOKENS,
    "vocab_size": english.VOCABULARY,
}


@dataclass(frozen=True, slots=True)
class Start:
    """What comes before the first prompt."""

    start_s: float
    """From nothing to a model whose chats can be rendered."""
    cpu_s: float
    memory_mib: float
    memory_after_mib: float
    """Once all chats are rendered."""


@dataclass(frozen=True, slots=True)
class Chats:
    """CPU microseconds per chat of one length, medians of the rounds."""

    characters: int
    here_us: float
    """Rendered and tokenised by the frontend."""
    frontend_us: float
    """The frontend's share where vLLM does it."""
    process_us: float


@contextmanager
def a_checkpoint() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path = write_checkpoint(Path(folder) / "model", english.tokenizer(LLAMA_3_REGEX))
        (path / "config.json").write_text(json.dumps(CONFIG))
        (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        yield path


def memory_mib(pid: int) -> float:
    """The resident memory of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def chats(characters: int, count: int, seed: int) -> list[ChatCompletionRequest]:
    texts = english.prompts(characters, 0, seed=seed)
    return [ChatCompletionRequest(messages=[{"role": "user", "content": next(texts)}]) for _ in range(count)]


def model_of(path: Path, prompts: OutsidePrompts | None) -> ServedModel:
    return ServedModel("m", ModelText.load(path, time.time), 16, CONTEXT_TOKENS, 0, prompts=prompts)


async def measure(path: Path, rounds: int, count: int) -> tuple[Start, list[Chats]]:
    """Everything, with a process of its own."""
    runtime = system_runtime()
    process = ParserProcess(ModuleLauncher(), runtime.transport, runtime.threads, FrontendMetrics(CollectorRegistry()))

    async def folder() -> Path:
        return path

    named = parser_pb2.ParserModel(tokenizer_mode=MODE, max_model_len_tokens=CONTEXT_TOKENS)
    prompts = OutsidePrompts(process, named, folder, is_only_way=True)
    began_s = time.perf_counter()
    await prompts.load()
    start_s, pid = time.perf_counter() - began_s, process.pid
    assert pid is not None, "it has loaded a model"
    cpu_s, mib = process_cpu_s(pid), memory_mib(pid)
    threads, here, there = SystemThreads(), model_of(path, None), model_of(path, prompts)
    measured = []
    for characters in CHARACTERS:
        spent: list[tuple[float, float, float]] = []
        for number in range(rounds + 1):
            asked = chats(characters, count, seed=characters + number)
            began = time.process_time()
            for chat in asked:
                await plan_chat(chat, "chat", here, threads)
            own = time.process_time() - began
            began, theirs = time.process_time(), process_cpu_s(pid)
            for chat in asked:
                await plan_chat(chat, "chat", there, threads)
            spent.append((own, time.process_time() - began, process_cpu_s(pid) - theirs))
        medians = [statistics.median(each) * 1e6 / count for each in zip(*spent[1:], strict=True)]
        measured.append(Chats(characters, *medians))
    start = Start(start_s, cpu_s, mib, memory_mib(pid))
    await process.stop()
    return start, measured


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Of each length, one more before them to warm up.")
@click.option("--chats", "count", default=200, show_default=True, help="In a round.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(rounds: int, count: int, json_path: Path | None) -> None:
    """Measure the process with vLLM's own parts."""
    with a_checkpoint() as path:
        start, measured = asyncio.run(measure(path, rounds, count))
    click.echo(
        f"start {start.start_s:.1f} s, {start.cpu_s:.1f} s of CPU; memory {start.memory_mib:,.0f} MiB, "
        f"{start.memory_after_mib:,.0f} MiB after all chats"
    )
    for each in measured:
        click.echo(
            f"{each.characters:,} characters: {each.here_us:,.0f} us in the frontend by itself; with vLLM "
            f"{each.frontend_us:,.0f} us there and {each.process_us:,.0f} us in the process"
        )
    if json_path is not None:
        figures = {"start": asdict(start), "chats": [asdict(each) for each in measured]}
        json_path.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
