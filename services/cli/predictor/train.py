"""`penstock predictor train`: fit a length predictor to collected data and write it as an artefact."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from controlplane.prediction.length_baselines import LengthBaseline
from controlplane.prediction.length_features import INPUTS, Inputs, features
from controlplane.prediction.length_samples import LengthSamples
from services.cli.predictor.evaluate import print_report
from services.cli.predictor.options import check_device, check_plots, data_option, output_options, read_dataset
from services.cli.time_columns import time_columns
from services.predictor.artefact import FORMAT, Artefact, ArtefactMetadata, TrainingRecord, load_artefact, save_artefact
from services.predictor.dataset import Dataset
from services.predictor.evaluation import EvaluationReport
from services.predictor.network import Network
from services.predictor.report import PREDICTOR, evaluate
from services.predictor.training_log import LoggedEpoch, write_log

REPORT_FILE = "report.json"
CHECKPOINT_FILE = ".training.pt"


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of `penstock predictor train`."""

    data: Path
    out: Path
    inputs: Inputs
    hidden_sizes: tuple[int, ...]
    learning_rate: float
    weight_decay: float
    batch: int
    epochs: int
    patience: int
    seed: int
    device: str
    threads: int
    compare: bool


def _sizes(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of widths such as 2048,512,64") from None
    if not sizes or min(sizes) < 1:
        raise click.BadParameter("widths must be at least 1")
    return sizes


@click.command("train")
@data_option
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the artefact.")
@click.option(
    "--inputs",
    type=click.Choice(INPUTS),
    default="state+counts",
    show_default=True,
    help="The hidden state alone (as in STAR), with the numbers of prompt and generated tokens, or these alone.",
)
@click.option(
    "--hidden-sizes",
    default="2048,512,64",
    show_default=True,
    callback=_sizes,
    help="Widths of the hidden layers.",
)
@click.option("--learning-rate", default=3e-4, show_default=True)
@click.option("--weight-decay", default=0.01, show_default=True)
@click.option("--batch", default=128, show_default=True, help="Samples of a gradient step.")
@click.option("--epochs", default=100, show_default=True, help="At most.")
@click.option("--patience", default=10, show_default=True, help="Epochs without a better validation error.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of torch.")
@click.option("--threads", default=1, show_default=True, help="Of torch on a CPU; small networks gain nothing by more.")
@click.option("--compare/--no-compare", default=False, help="Train ablations and a model of the prompt beside it.")
@output_options
def command(as_json: bool, plots: Path | None, **options: Any) -> None:
    """Train a predictor on collected samples, and report its error on held-out requests.

    Writes the artefact (predictor.json, weights), report.json and the course of the training. Interrupted, it goes on
    from the last epoch when called again with the same options. A mesh that serves the folder takes the new artefact
    up by itself.
    """
    check_plots(plots)
    check_device(options["device"])
    report = _train(TrainOptions(**options), plots)
    print_report(report, as_json)


def _train(options: TrainOptions, plots: Path | None) -> EvaluationReport:
    import torch

    from services.predictor.training import Epoch, TrainingSettings, train_network

    torch.set_num_threads(options.threads)
    dataset = read_dataset(options.data)
    settings = TrainingSettings(
        hidden_sizes=options.hidden_sizes,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        batch_samples=options.batch,
        epochs=options.epochs,
        patience_epochs=options.patience,
        seed=options.seed,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    epochs: list[Epoch] = []
    started_s = time.monotonic()
    with _progress(options.epochs) as show:

        def on_epoch(epoch: Epoch) -> None:
            epochs.append(epoch)
            show(epoch.number, epoch.validation_mae_tokens)

        network = train_network(
            _pairs(options.inputs, dataset.splits["train"]),
            _pairs(options.inputs, dataset.splits["validation"]),
            settings,
            on_epoch,
            options.device,
            options.out / CHECKPOINT_FILE,
        )
    best = max(epoch.number for epoch in epochs if epoch.is_best)
    record = _record(options, dataset, len(epochs), best, time.monotonic() - started_s)
    learned = _learn_others(options, settings, dataset) if options.compare else {}
    draft = _metadata(options, dataset, network, record)
    report = evaluate(Artefact(draft, network), dataset, learned)
    baselines = {name: mae for name, mae in report.mae_tokens.items() if name != PREDICTOR}
    metadata = msgspec.structs.replace(draft, mae_tokens=report.mae_tokens_by_split, baseline_mae_tokens=baselines)
    log = [LoggedEpoch(epoch.number, epoch.train_mae_tokens, epoch.validation_mae_tokens) for epoch in epochs]
    write_log(options.out, log)
    saved = save_artefact(options.out, metadata, network)
    report = msgspec.structs.replace(report, artefact=load_artefact(options.out).name)
    (options.out / REPORT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if plots is not None:
        from services.predictor.plots import draw_errors, draw_loss

        draw_loss(plots / f"{saved.model}-loss.png", log, f"{saved.model}: training of the length predictor")
        draw_errors(plots / f"{saved.model}-errors.png", report)
    return report


def _pairs(inputs: Inputs, samples: LengthSamples) -> Any:
    rows = features(inputs, samples.states, samples.prompt_tokens, samples.generated_tokens)
    return rows, samples.remaining_tokens


def _learn_others(options: TrainOptions, settings: Any, dataset: Dataset) -> dict[str, LengthBaseline]:
    from services.predictor.evaluation import LengthPrediction
    from services.predictor.prompt_model import PromptReader
    from services.predictor.training import train_network

    splits = dataset.splits
    learned: dict[str, LengthBaseline] = {}
    for inputs in INPUTS:
        if inputs != options.inputs:
            with _progress(options.epochs, f"for comparison: {inputs}") as show:
                network = train_network(
                    _pairs(inputs, splits["train"]),
                    _pairs(inputs, splits["validation"]),
                    settings,
                    lambda epoch, show=show: show(epoch.number, epoch.validation_mae_tokens),  # type: ignore[misc]
                    options.device,
                )
            learned[f"inputs:{inputs}"] = LengthPrediction(network, inputs)
    learned["prompt_reader"] = PromptReader(
        splits["train"], splits["validation"], dataset.prompts, settings, options.device
    )
    return learned


def _metadata(options: TrainOptions, dataset: Dataset, network: Network, record: TrainingRecord) -> ArtefactMetadata:
    description = dataset.description
    return ArtefactMetadata(
        format=FORMAT,
        version="",
        model=description.model,
        model_fingerprint=description.model_fingerprint,
        hidden_size=description.hidden_size,
        inputs=options.inputs,
        sizes=tuple(weight.shape[0] for weight in network.weights),
        weights_file="",
        weights_sha256="",
        mae_tokens={},
        baseline_mae_tokens={},
        training=record,
    )


def _record(options: TrainOptions, dataset: Dataset, epochs: int, best_epoch: int, seconds: float) -> TrainingRecord:
    description = dataset.description
    return TrainingRecord(
        source=description.source,
        every_tokens=description.every_tokens,
        temperature=description.temperature,
        max_tokens=description.max_tokens,
        requests=dict(dataset.requests),
        samples={name: len(samples) for name, samples in dataset.splits.items()},
        seed=options.seed,
        learning_rate=options.learning_rate,
        batch_samples=options.batch,
        patience_epochs=options.patience,
        epochs=epochs,
        best_epoch=best_epoch,
        seconds=round(seconds, 1),
    )


@contextmanager
def _progress(epochs: int, title: str = "training") -> Iterator[Any]:
    """A progress bar on stderr where that is a terminal; yields the function to call with each epoch."""
    console = Console(stderr=True)
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs, validation MAE {task.fields[mae]:.2f} tokens"),
        *time_columns(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as drawn:
        bar = drawn.add_task("", total=epochs, mae=float("nan"))
        yield lambda number, mae: drawn.update(bar, completed=number, mae=mae)
