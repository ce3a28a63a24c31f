"""The command group `penstock predictor`, whose subcommands are imported only when they are run."""

import importlib

import click

STEPS = {
    "collect": ("services.cli.predictor.collect", "Record hidden states of running requests and what came of them."),
    "train": ("services.cli.predictor.train", "Train a predictor on what was collected, and report its error."),
    "evaluate": ("services.cli.predictor.evaluate", "Report an artefact's error on held-out requests."),
    "serve": ("services.cli.predictor.serve", "Run the length predictor of a mesh (penstock serve predictor)."),
}


class StepGroup(click.Group):
    """Imports a step when it is called: training needs torch, collecting needs vLLM."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Subcommands in the order in which they are used, not by name."""
        return list(STEPS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The step's command, or None."""
        if cmd_name not in STEPS:
            return None
        command = importlib.import_module(STEPS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in --help, without importing every step."""
        with formatter.section("Steps"):
            formatter.write_dl([(name, text) for name, (_, text) in STEPS.items()])


@click.command(cls=StepGroup)
def command() -> None:
    """Predict how many tokens running requests will still generate, from the model's own hidden states."""
