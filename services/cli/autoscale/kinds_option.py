"""Kinds of replica on the command line."""

import click

kinds_option = click.option(
    "--kind",
    "kinds",
    metavar="NAME=VALUE,...",
    multiple=True,
    help="A kind of replica to choose among, by gpu, tp, pp, price-per-hour (of a GPU), capacity, maximum; repeatable. "
    "Kinds alone say shapes, prices and capacities then.",
)
