"""`penstock predictor serve`: the predictor's role, as `penstock serve predictor` runs it."""

import click

from services.cli.serve import command as roles

command = roles.get_command(click.Context(roles), "predictor")
