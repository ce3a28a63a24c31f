"""`penstock predictor serve`, another name of `penstock serve predictor`."""

import click

from services.cli.serve import command as roles

command = roles.get_command(click.Context(roles), "predictor")
