"""`penstock completion SHELL`: what a shell needs to complete `penstock`."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "penstock"
VARIABLE = "_PENSTOCK_COMPLETE"
"""By which the shell asks `penstock` what may come next; click looks at it."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes commands and options.

    bash: eval "$(penstock completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc; fish: penstock completion fish >
    ~/.config/fish/completions/penstock.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None, "click knows the shells that are choices here"
    click.echo(completion(ctx.find_root().command, {}, PROGRAM, VARIABLE).source())
