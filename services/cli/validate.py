"""`penstock validate`: the simulator against measurements of real engines."""

from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from services.cli.report_output import STDOUT
from services.cli.validation.bounds import is_kept
from services.cli.validation.report import case_table, encode_cases
from simulator.profiles.folder import ProfileFolder
from simulator.validation.case import Case
from simulator.validation.engine_runs import RUNS, engine_run_cases
from simulator.validation.single_steps import single_step_cases
from simulator.validation.throughput import summary, throughput_case, throughput_rows

EXIT_TOO_FAR = 1

SUITES = ("vllm", "tensorrt-llm", "splitwise")


@click.command()
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of published measurements (docs/cost_models.md lists them).",
)
@click.option("--suite", "suites", multiple=True, type=click.Choice(SUITES), help="Only these; default: all.")
@click.option("--every-row", is_flag=True, help="Show every row of the throughput table, not only the median.")
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value=STDOUT,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write the cases as JSON; without a file, or with -, print it instead of the table.",
)
@click.pass_context
def command(
    ctx: click.Context, data: Path | None, suites: tuple[str, ...], every_row: bool, json_path: str | None
) -> None:
    """Simulate what was measured on real engines and report measured, simulated and error of each number.

    Exit status: 0 every number within its limit, 1 some are not, 2 used wrongly.
    """
    if data is None:
        raise click.UsageError("--data names the folder of measurements")
    cases = _published_cases(ProfileFolder(data), suites or SUITES)
    if json_path == STDOUT:
        click.echo(encode_cases(cases), nl=False)
    else:
        if json_path is not None:
            Path(json_path).write_bytes(encode_cases(cases))
        Console().print(case_table(cases, every_row=every_row))
    ctx.exit(0 if all(map(is_kept, cases)) else EXIT_TOO_FAR)


def _published_cases(folder: ProfileFolder, suites: tuple[str, ...]) -> list[Case]:
    console = Console(stderr=True)
    cases: list[Case] = []
    if "vllm" in suites:
        for run in track(RUNS, "vLLM runs", console=console):
            cases += engine_run_cases(folder, run)
    if "tensorrt-llm" in suites:
        rows = [throughput_case(row) for row in track(throughput_rows(folder), "TensorRT-LLM rows", console=console)]
        cases += [*rows, summary(rows)]
    if "splitwise" in suites:
        cases += single_step_cases(folder)
    return cases
