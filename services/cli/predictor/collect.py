"""`penstock predictor collect`: hidden states and lengths of a model's own answers, as training data."""

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from engine_worker.engine_args import engine_settings
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import ConfigurationError
from mesh.runtime import SystemClock
from services.cli.predictor.collecting import Collector, CollectProgress
from services.cli.predictor.prompts import prompt_source, tokenised_prompts
from services.cli.supervisor.local_mesh import parse_model
from services.cli.time_columns import time_columns
from services.frontend.text.model_text import ModelText
from services.predictor.dataset import DatasetDescription, DatasetFolder

REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """Options of `penstock predictor collect`."""

    model: str
    out: Path
    prompts: Path | None
    hardest: int
    requests: int
    every: int
    max_tokens: int
    temperature: float
    seed: int
    part_requests: int
    engine_arg: tuple[str, ...]


@click.command("collect")
@click.option("--model", required=True, help="A demo model, a checkpoint's directory or NAME=DIRECTORY.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the dataset; may be begun.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='JSON lines of {"messages": [...]} or {"prompt": "..."}. Default: the demo tasks.',
)
@click.option(
    "--hardest",
    type=click.IntRange(1, 8),
    default=8,
    show_default=True,
    help="Difficulty of the hardest demo tasks; demo-small was trained on 1 to 4, demo-medium on 1 to 6.",
)
@click.option("--requests", default=4000, show_default=True, help="Requests to run.")
@click.option("--every", default=20, show_default=True, help="Generated tokens from one sample to the next.")
@click.option("--max-tokens", default=512, show_default=True, help="An answer is cut there.")
@click.option("--temperature", default=1.0, show_default=True, help="Of sampling; 0: greedy.")
@click.option("--seed", default=0, show_default=True, help="Of the choice of demo tasks and of the engine.")
@click.option("--part-requests", default=250, show_default=True, help="Requests per file; a part begun is lost.")
@click.option("--engine-arg", multiple=True, help="An engine argument of vLLM, NAME=VALUE; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool, **options: object) -> None:
    """Run requests on a vLLM engine and record their hidden states with the lengths that came of them.

    Called again with the same options, it goes on where it was interrupted.
    """
    outcome = asyncio.run(_collect(CollectOptions(**options)))  # type: ignore[arg-type]
    click.echo(json.dumps(outcome) if as_json else _sentence(outcome))


async def _collect(options: CollectOptions) -> dict[str, object]:
    if min(options.requests, options.every, options.max_tokens, options.part_requests) < 1:
        raise ConfigurationError("--requests, --every, --max-tokens and --part-requests must be at least 1")
    model = parse_model(options.model, 1)
    text = ModelText.load(model.path, SystemClock().unix_s)
    prompts = list(tokenised_prompts(text, options.prompts, options.hardest, options.requests, options.seed))
    settings = engine_settings(
        VllmSettings,
        options.engine_arg,
        {"model_path": str(model.path), "seed": options.seed, "movable": False},
        others="others",
    )
    description = DatasetDescription(
        model=model.name,
        model_fingerprint=checkpoint_fingerprint(model.path),
        hidden_size=_hidden_size(model.path),
        every_tokens=options.every,
        source=prompt_source(options.prompts, options.hardest),
        seed=options.seed,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        dtype=settings.dtype,
        part_requests=options.part_requests,
    )
    folder = DatasetFolder(options.out)
    present = folder.open(description)
    engine = VllmEngine(settings)
    started_s = time.monotonic()
    limits = await engine.start()
    try:
        collector = Collector(engine, folder, description, prompts, 2 * limits.max_batch_requests, time.monotonic)
        drawing = asyncio.create_task(_show(collector.progress))
        try:
            await collector.run(present)
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)
    finally:
        await engine.stop()
    return _outcome(collector.progress, options.out, time.monotonic() - started_s)


def _hidden_size(model_path: Path) -> int:
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["hidden_size"])


def _outcome(progress: CollectProgress, out: Path, seconds: float) -> dict[str, object]:
    collected = progress.done - progress.failed
    return {
        "dataset": str(out),
        "requests": progress.requests,
        "collected": collected,
        "were_there": progress.skipped,
        "failed": progress.failed,
        "cut": progress.cut,
        "samples": progress.samples,
        "missing_samples": progress.missing_samples,
        "mean_output_tokens": progress.output_tokens / max(1, collected),
        "seconds": round(seconds, 1),
    }


def _sentence(outcome: dict[str, object]) -> str:
    return (
        f"{outcome['dataset']}: {outcome['collected']} requests collected ({outcome['were_there']} were there, "
        f"{outcome['failed']} failed, {outcome['cut']} cut at the limit), {outcome['samples']} samples, "
        f"{outcome['missing_samples']} missing, in {outcome['seconds']} s"
    )


async def _show(progress: CollectProgress) -> None:
    """Draw until cancelled, on stderr and only where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    columns = (
        TextColumn("collecting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[samples]} samples"),
        *time_columns(),
    )
    with Progress(*columns, console=console, auto_refresh=False) as drawn:
        bar = drawn.add_task("", total=progress.requests, samples=0)
        while True:
            drawn.update(bar, completed=progress.done + progress.skipped, samples=progress.samples)
            drawn.refresh()
            await asyncio.sleep(REFRESH_S)
