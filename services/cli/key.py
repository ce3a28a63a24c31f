"""`penstock key NAME`: make an API key."""

import secrets

import click

from services.frontend.requests.api_keys import SECRET_BYTES, new_key_line


@click.command()
@click.argument("name")
def command(name: str) -> None:
    """Make an API key for NAME.

    The key goes to the terminal (stderr), once; the line with its hash goes to stdout, to be appended to the key file:
    penstock key alice >> keys.txt
    """
    key, line = new_key_line(name, secrets.token_bytes(SECRET_BYTES))
    click.echo(f"key for {name}, shown only now: {key}", err=True)
    click.echo(line)
