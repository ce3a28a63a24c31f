"""CPU per request and per streamed chunk of Penstock beside other routers, taking turns in one run.

    python -m benchmarks.peers --venvs DIR [--router smg] [--rounds 8] [--json OUT]

Every router tokenizes, places and detokenizes in front of four engines that make tokens of nothing, over the loopback.
The CPU is that of the router's processes, user and system, less what they use when idle; the client and the engines do
not count. `DIR/smg` and `DIR/dynamo` are virtual environments:

    python -m venv DIR/smg && DIR/smg/bin/pip install smg==1.13.0 smg-grpc-proto
    python -m venv DIR/dynamo && DIR/dynamo/bin/pip install ai-dynamo-runtime==1.6.1 'aiohttp>=3.14.3' kubernetes \\
        msgspec prometheus-client pyzmq 'redis<9' tqdm transformers zstandard
    DIR/dynamo/bin/pip install --no-deps ai-dynamo==1.6.1
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from benchmarks import english
from benchmarks.identity_cpu import cpu_s
from benchmarks.peers.routers import ROUTERS, Router, Setting, wait_until_answering
from benchmarks.peers.workload import WORKLOADS, Answered, Workload, ask
from tests.unit.services.frontend.checkpoints import LLAMA_3_REGEX, write_checkpoint

IDLE_S = 2.0
CONFIGURATION = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": english.VOCABULARY,
        "max_position_embeddings": 65536,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "torch_dtype": "bfloat16",
    },
    "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 65536,
    },
}
"""What a checkpoint has besides its tokenizer. There are no weights."""
Measured = dict[tuple[str, str], list[dict[str, float]]]
"""By router and workload: of each round the microseconds per unit of each role, and `ttft_ms`."""


def a_round(router: Router, workload: Workload, seed: int, requests: int, idle: dict[str, float]) -> dict[str, float]:
    """One round of one router. `idle`: CPU seconds per second of each role that has nothing to do."""
    before, began_s = cpu_s(router.pids), time.monotonic()
    answered: Answered = asyncio.run(ask(router.url, workload, seed, requests))
    took_s, after = time.monotonic() - began_s, cpu_s(router.pids)
    spent = {
        role: 1e6 * (after[role] - before[role] - idle[role] * took_s) / max(1, answered.units) for role in router.pids
    }
    return {**spent, "all": sum(spent.values()), "ttft_ms": answered.ttft_ms}


def idle_shares(router: Router) -> dict[str, float]:
    before, began_s = cpu_s(router.pids), time.monotonic()
    time.sleep(IDLE_S)
    after, took_s = cpu_s(router.pids), time.monotonic() - began_s
    return {role: (after[role] - before[role]) / took_s for role in router.pids}


def measure(names: list[str], venvs: Path, rounds: int, share: float) -> Measured:
    """All workloads, those of one pace of the engines after another, since routers are started anew for each pace."""
    measured: Measured = {}
    seed = 0
    for step_ms, group in groupby(WORKLOADS, key=lambda workload: workload.step_ms):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            checkpoint = write_checkpoint(Path(folder) / "model", tokenizer=english.tokenizer(LLAMA_3_REGEX))
            for name, content in CONFIGURATION.items():
                (checkpoint / name).write_text(json.dumps(content))
            running: dict[str, Router] = {}
            for name in names:
                place = Path(folder) / name
                place.mkdir()
                router = stack.enter_context(ROUTERS[name](Setting(place, checkpoint, venvs, step_ms)))
                wait_until_answering(router, name, place)
                running[name] = router
            workloads = list(group)
            for number in range(rounds + 1):
                order = names[number % len(names) :] + names[: number % len(names)]
                idle = {name: idle_shares(running[name]) for name in order}
                for workload in workloads:
                    for name in order:
                        seed += 1
                        requests = max(workload.at_once, round(workload.requests * share))
                        spent = a_round(running[name], workload, seed, requests, idle[name])
                        measured.setdefault((name, workload.name), []).append(spent)
                click.echo(f"round {number} of {rounds}, load {os.getloadavg()[0]:.1f}", err=True)
    return {key: spent[1:] for key, spent in measured.items()}


@click.command()
@click.option("--venvs", type=click.Path(path_type=Path), default=Path(".peers"), show_default=True)
@click.option("--router", "names", multiple=True, type=click.Choice(tuple(ROUTERS)), help="Default: all.")
@click.option("--rounds", default=8, show_default=True, help="Of each router, one more before them to warm up.")
@click.option("--share", default=1.0, show_default=True, help="Of the requests of a round.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(venvs: Path, names: tuple[str, ...], rounds: int, share: float, json_path: Path | None) -> None:
    """Measure routers side by side."""
    chosen = list(names or ROUTERS)
    measured = measure(chosen, venvs.absolute(), rounds, share)
    figures: list[dict[str, Any]] = []
    click.echo(f"CPU us, medians of {rounds} rounds (lowest to highest)")
    for workload in WORKLOADS:
        for name in chosen:
            spent = measured[name, workload.name]
            medians = {part: statistics.median(each[part] for each in spent) for part in spent[0]}
            figures.append({"workload": workload.name, "router": name, "medians": medians, "rounds": spent})
            parts = [f"{role} {medians[role]:.0f}" for role in spent[0] if role not in ("all", "router", "ttft_ms")]
            low, high = min(each["all"] for each in spent), max(each["all"] for each in spent)
            click.echo(
                f"{workload.name:30} {name:9} {medians['all']:6.0f} ({low:.0f} to {high:.0f})  "
                f"TTFT p50 {medians['ttft_ms']:.0f} ms  {', '.join(parts)}"
            )
    if json_path:
        json_path.write_text(json.dumps({"rounds": rounds, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
