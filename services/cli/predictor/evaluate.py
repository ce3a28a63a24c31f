"""`penstock predictor evaluate`: the error of a trained predictor on held-out requests, beside simpler methods."""

from pathlib import Path

import click
import msgspec
from rich.table import Table

from mesh.errors import ConfigurationError
from services.cli.predictor.options import check_fits, check_plots, data_option, output_options, read_dataset
from services.cli.terminal_table import fitted, output_console
from services.predictor.artefact import load_artefact
from services.predictor.evaluation import EvaluationReport
from services.predictor.report import evaluate
from services.predictor.training_log import read_log


@click.command("evaluate")
@data_option
@click.option("--artefact", "folder", type=click.Path(path_type=Path), required=True, help="Folder of the artefact.")
@output_options
def command(data: Path, folder: Path, as_json: bool, plots: Path | None) -> None:
    """Report an artefact's error on the held-out requests of a dataset, beside the baselines'.

    An artefact of another model than the dataset's is refused.
    """
    check_plots(plots)
    artefact = load_artefact(folder)
    dataset = read_dataset(data)
    check_fits(artefact, dataset)
    report = evaluate(artefact, dataset)
    if plots is not None:
        from services.predictor.plots import draw_errors, draw_loss

        draw_errors(plots / f"{report.model}-errors.png", report)
        try:
            draw_loss(plots / f"{report.model}-loss.png", read_log(folder), f"{report.model}: training")
        except ConfigurationError as error:
            click.echo(f"no picture of the losses: {error}", err=True)
    print_report(report, as_json)


def print_report(report: EvaluationReport, as_json: bool) -> None:
    """Print the report as JSON or as tables."""
    if as_json:
        click.echo(msgspec.json.encode(report))
        return
    console = output_console()
    table = Table("method", "MAE (tokens)", title=f"{report.artefact}, held-out requests", title_justify="left")
    for name, mae in sorted(report.mae_tokens.items(), key=lambda entry: entry[1]):
        table.add_row(name, f"{mae:.2f}")
    console.print(fitted(table, console.width))
    console.print(
        f"{report.change_percent:+.1f} % against the best baseline ({report.best_baseline}); {report.requests['test']} "
        f"requests and {report.samples['test']} samples held out, {report.mean_remaining_tokens:.1f} tokens to come on "
        "average"
    )
