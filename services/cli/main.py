"""The `penstock` command. A subcommand's module is imported when it is called, so that each starts fast."""

import importlib
import sys
from collections.abc import Sequence

import click

from mesh.errors import ConfigurationError, PenstockError
from mesh.release import release_line

EXIT_FAILED = 1
EXIT_USAGE = 2

COMMANDS = {
    "up": ("services.cli.up", "Start a whole mesh on this machine."),
    "attach": ("services.cli.attach", "Have a server that runs already serve in a mesh."),
    "status": ("services.cli.status", "Show roles, instances, load, policy and leases."),
    "top": ("services.cli.top", "Watch faults, rates, percentiles and the busiest instances."),
    "explain": ("services.cli.explain", "Show why a request was placed where it was."),
    "decisions": ("services.cli.decisions", "Run a scheduler's recording again and compare its decisions."),
    "replay": ("services.cli.console.command", "Open recordings as a console with a time slider, side by side."),
    "policy": ("services.cli.policy", "Show or switch the placement policy."),
    "rescheduler": ("services.cli.rescheduler", "Show or switch what moves running requests."),
    "stages": ("services.cli.stages", "Show, plan or switch length-specialised stages."),
    "migrate": ("services.cli.migrate", "Move a running request to another instance."),
    "drain": ("services.cli.drain", "Move everything away from an instance, then end it."),
    "restart": ("services.cli.restart", "Start a process anew, or all in turn, without failing a request."),
    "bench": ("services.cli.bench", "Replay a trace through an endpoint and report latency and goodput."),
    "chaos": ("services.cli.chaos.command", "Break workers under running streams and check every answer."),
    "fuzz": ("services.cli.fuzz", "Simulate whole meshes under faults, each from one seed."),
    "simulate": ("services.cli.simulate", "Run a trace through a simulated mesh and report the same."),
    "compare": ("services.cli.compare", "Simulate several placement policies side by side."),
    "reproduce": ("services.cli.reproduce", "Measure again what a paper reports, and say where it differs."),
    "predictor": ("services.cli.predictor.command", "Collect samples for, train and evaluate a length predictor."),
    "cascade": ("services.cli.cascade", "Show, set or remove cascades of models."),
    "lora": ("services.cli.lora", "Load, unload or list LoRA adapters."),
    "plan": ("services.cli.planning.command", "Plan a cascade: thresholds, GPUs and replicas of every tier."),
    "autoscale": ("services.cli.autoscale.command", "Have a model's instances follow its load."),
    "profile": ("services.cli.profile", "Measure an instance and fit what its work costs."),
    "validate": ("services.cli.validate", "Compare the simulator with measurements of real engines."),
    "doctor": ("services.cli.doctor.command", "Check this machine, and say what to mend."),
    "plugins": ("services.cli.plugins", "List policies, engines and judges, those of installed packages too."),
    "ca": ("services.cli.ca", "Make the identities of a mesh's processes, and show who may do what."),
    "key": ("services.cli.key", "Make an API key."),
    "usage": ("services.cli.usage", "Sum up what tenants and models have used."),
    "budgets": ("services.cli.budgets", "Show what keys have left of their budgets."),
    "audit": ("services.cli.audit", "Show who ordered the mesh to do what."),
    "completion": ("services.cli.completion", "Have a shell complete commands and options."),
    "serve": ("services.cli.serve", "Run one role of the mesh in this process."),
}


class LazyGroup(click.Group):
    """Knows its subcommands by name and one line; loads the module of the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[cmd_name][0]}.command is no click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in --help, without importing every subcommand."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Version and commit, and that is all."""
    if is_asked and not context.resilient_parsing:
        click.echo(f"penstock {release_line()}")
        context.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Which release."
)
def penstock() -> None:
    """Penstock: one OpenAI-compatible endpoint in front of many stock vLLM instances.

    Exit status: 0 done, 1 failed, 2 used wrongly.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: Penstock's own errors become one line and an exit status. `arguments`: by default the process's."""
    try:
        penstock.main(args=arguments, prog_name="penstock", standalone_mode=True)
    except ConfigurationError as error:
        click.echo(f"penstock: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except PenstockError as error:
        click.echo(f"penstock: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        if error.filename is None:
            raise
        click.echo(f"penstock: cannot read or write {error.filename}: {error.strerror}", err=True)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
