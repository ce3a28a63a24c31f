"""`penstock key NAME`: make an API key."""

import secrets
from datetime import datetime

import click

from services.frontend.requests.api_keys import SECRET_BYTES, new_key_line


@click.command()
@click.argument("name")
@click.option(
    "--operator", "is_operator", is_flag=True, help="It may act in the console, and load and unload LoRA adapters, too."
)
@click.option("--requests-per-min", type=click.FloatRange(min=0, min_open=True), help="Requests that it may make.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests that it may have under way at once.")
@click.option(
    "--tokens-per-min",
    type=click.FloatRange(min=0, min_open=True),
    help="Tokens that it may take, of prompts and answers together.",
)
@click.option(
    "--tokens-per-day",
    type=click.FloatRange(min=0, min_open=True),
    help="Its budget: tokens of prompts and answers that it may take in a day, in UTC.",
)
@click.option(
    "--tokens-per-month",
    type=click.FloatRange(min=0, min_open=True),
    help="Its budget: tokens that it may take in a calendar month, in UTC.",
)
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), help="The last day, in UTC, on which it opens anything.")
@click.option("--model", "models", multiple=True, help="A model or a cascade that it is for; repeatable. Default: all.")
@click.option("--lowest-priority", type=int, help="Lower numbers go first; the lowest that its requests may have.")
@click.option(
    "--share",
    type=click.FloatRange(min=0, min_open=True),
    help="Of what is to be had where keys compete; one of 2 is served twice the tokens of one of 1, the default.",
)
def command(
    name: str,
    is_operator: bool,
    requests_per_min: float | None,
    concurrency: int | None,
    tokens_per_min: float | None,
    tokens_per_day: float | None,
    tokens_per_month: float | None,
    expires: datetime | None,
    models: tuple[str, ...],
    lowest_priority: int | None,
    share: float | None,
) -> None:
    """Make an API key for NAME.

    The key goes to the terminal (stderr), once; the line with its hash goes to stdout, to be appended to the key file:
    penstock key alice >> keys.txt. Frontends take it in within a second.
    """
    key, line = new_key_line(
        name,
        secrets.token_bytes(SECRET_BYTES),
        is_operator=is_operator,
        requests_per_min=requests_per_min,
        concurrency=concurrency,
        tokens_per_min=tokens_per_min,
        tokens_per_day=tokens_per_day,
        tokens_per_month=tokens_per_month,
        expires=None if expires is None else expires.date(),
        models=models,
        lowest_priority=lowest_priority,
        share=share,
    )
    click.echo(f"key for {name}, shown only now: {key}", err=True)
    click.echo(line)
