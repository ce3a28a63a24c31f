"""`penstock ca`: a mesh's own certificate authority, and who may do what with the certificates that it signs."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from mesh.errors import ConfigurationError
from mesh.identity.doors import AUDIT, KEYS, MEMBERS, SERVICES
from mesh.identity.files import IdentityFolder, own_folder
from mesh.identity.identity import ANY_ROLE, DEFAULT_TRUST_DOMAIN, ROLES, Identity, expected_dns_name
from mesh.run_file import find_mesh
from services.cli.connection import OPERATOR, store_options

AUTHORITY = "authority"

_folder = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("identity"),
    show_default=True,
    help="Where identities are kept: the authority in `authority`, that of each role in a folder of its name.",
)

_trust_domain = click.option(
    "--trust-domain",
    default=DEFAULT_TRUST_DOMAIN,
    show_default=True,
    help="The mesh's name in identities: spiffe://TRUST_DOMAIN/ROLE.",
)
_days = click.option(
    "--days", type=click.FloatRange(min=0, min_open=True, max=3650), default=90.0, show_default=True, help="Validity."
)


@click.group()
def command() -> None:
    """Make a mesh's certificate authority and the identities of its processes.

    With an identity, every gRPC connection of a process is mutual TLS, and each role may call only what is its own.
    """


@command.command()
@_folder
@_trust_domain
@click.option("--issue", is_flag=True, help="Issue an identity of every role besides.")
def init(folder: Path, trust_domain: str, issue: bool) -> None:
    """Make an authority. Keep authority/ca-key.pem where no process of the mesh runs."""
    from mesh.identity.authority import Authority

    now = datetime.now(UTC)
    authority = Authority.create(folder / AUTHORITY, trust_domain, now)
    click.echo(f"authority of spiffe://{trust_domain}/ in {folder / AUTHORITY}")
    for role in ROLES if issue else ():
        authority.issue(Identity(trust_domain, role), folder / role, now)
        click.echo(f"{folder / role}: spiffe://{trust_domain}/{role}")


@command.command()
@click.argument("role", type=click.Choice(ROLES))
@_folder
@click.option("--name", default="", help="Member id of the only process that may use it; default: any of the role.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Default: a folder of the role's name.")
@_days
@click.option("--host", "hosts", multiple=True, help="A host name or address it is to name besides; repeatable.")
def issue(role: str, folder: Path, name: str, out: Path | None, days: float, hosts: tuple[str, ...]) -> None:
    """Issue the identity of a ROLE, or renew it: processes that run take the new files without a restart."""
    from mesh.identity.authority import Authority

    authority = Authority.open(folder / AUTHORITY)
    identity = Identity(authority.trust_domain, role, name)
    target = out or folder / role
    authority.issue(identity, target, datetime.now(UTC), days, hosts)
    click.echo(f"{target}: {identity}, for {days:g} days")


@command.command()
@_folder
@_trust_domain
@_days
@click.option("--store-host", "hosts", multiple=True, help="A host name or address of etcd; repeatable.")
def ensure(folder: Path, trust_domain: str, days: float, hosts: tuple[str, ...]) -> None:
    """Make what is missing: an authority, and of every role an identity that has a third of its validity left.

    What is there and good stays, so this can run at every start, as it does in deploy/compose.yaml.
    """
    from mesh.identity.authority import Authority

    now = datetime.now(UTC)
    exists = (folder / AUTHORITY / "ca-key.pem").exists()
    authority = (
        Authority.open(folder / AUTHORITY) if exists else Authority.create(folder / AUTHORITY, trust_domain, now)
    )
    for role in ROLES:
        identity, target, names = (
            Identity(authority.trust_domain, role),
            folder / role,
            hosts if role == "store" else (),
        )
        if authority.has_issued(identity, target, now, timedelta(days=days / 3), names):
            click.echo(f"{target}: {identity} is good")
        else:
            authority.issue(identity, target, now, days, names)
            click.echo(f"{target}: {identity}, for {days:g} days")


@command.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(folder: Path, as_json: bool) -> None:
    """Show whose identity is in FOLDER and when it expires. Exit status 2 if it is none, or has expired."""
    credentials = IdentityFolder(folder).credentials()
    identity, left = credentials.identity, credentials.expires - datetime.now(UTC)
    content: dict[str, Any] = {
        "identity": str(identity),
        "trust_domain": identity.trust_domain,
        "role": identity.role,
        "name": identity.name,
        "expires": credentials.expires.isoformat(),
    }
    if as_json:
        click.echo(json.dumps(content, indent=2))
    else:
        click.echo(f"{identity} until {credentials.expires:%Y-%m-%d %H:%M} UTC ({left.days} days)")
    if left.total_seconds() < 0:
        raise ConfigurationError(f"{folder} has expired; issue it anew with `penstock ca issue {identity.role}`")


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doors(as_json: bool) -> None:
    """Show who may call which method, and who may write which keys of the state store."""
    methods = {
        f"penstock.v1.{service}/{method}": sorted(roles | {OPERATOR})
        for service, methods in SERVICES.items()
        for method, roles in methods.items()
    }
    keys = {f"{prefix}ROLE/": ["ROLE", OPERATOR] for prefix in (MEMBERS, AUDIT)} | {
        key: sorted(roles | {OPERATOR}) for key, roles in KEYS.items()
    }
    if as_json:
        click.echo(json.dumps({"methods": methods, "keys": keys}, indent=2))
        return
    width = max(map(len, (*methods, *keys)))
    for door, roles in (*methods.items(), *keys.items()):
        click.echo(f"{door:{width}}  {'every member' if len(roles) > 7 else ', '.join(roles)}")


@command.command("grpcurl")
@store_options
def grpcurl_flags(store: str | None, mesh: str) -> None:
    """Print grpcurl's options for an operator of the mesh: grpcurl $(penstock ca grpcurl) HOST:PORT list."""
    identity = find_mesh(store, mesh).identity
    if not identity:
        click.echo("-plaintext")
        return
    folder = own_folder(identity, OPERATOR)
    paths = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}
    if not paths["cert"].exists():
        paths = {name: folder / file for name, file in zip(paths, ("ca.crt", "tls.crt", "tls.key"), strict=True)}
    click.echo(
        f"-cacert {paths['ca']} -cert {paths['cert']} -key {paths['key']} -servername {expected_dns_name(ANY_ROLE)}"
    )
