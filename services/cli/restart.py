"""`penstock restart MEMBER` and `penstock restart --rolling`: start processes anew without failing a request."""

import time
from collections.abc import Sequence

import click
import msgspec

from mesh.errors import ConfigurationError, PeerUnavailable
from mesh.membership import Directory, Member
from services.cli.connection import mesh_directory, mesh_store, run, store_options
from services.cli.finite_range import POSITIVE, FiniteRange
from services.cli.restarting import ROLLING_ORDER, Restarted, RestartTimeouts, in_rolling_order, restart_in_turn

STORE_STAYS = "the state store is no member of the mesh (`penstock up` runs it inside itself) and is not restarted"


class RestartReport(msgspec.Struct, frozen=True):
    """The JSON that `penstock restart --json` prints."""

    restarted: tuple[Restarted, ...]
    """The restarted members, in the order of their restarts."""
    excepted: tuple[str, ...]
    """What was not restarted although everything was to be, and why."""
    duration_s: float


@click.command()
@click.argument("member_id", required=False)
@click.option("--rolling", is_flag=True, help="Every member in turn, or every one of --role.")
@click.option("--role", type=click.Choice(ROLLING_ORDER), help="Where two roles have a member of that name.")
@click.option(
    "--drain-s",
    type=FiniteRange(min=0, max=1e6),
    help="What running work is given before it is cut. Default: as long as after SIGTERM; the only worker of a model "
    "is cut at once, for its requests wait in any case.",
)
@click.option(
    "--timeout-s",
    type=POSITIVE,
    default=300.0,
    show_default=True,
    help="Seconds for each process to serve again after its drain.",
)
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    member_id: str | None,
    rolling: bool,
    role: str | None,
    drain_s: float | None,
    timeout_s: float,
    store: str | None,
    mesh: str,
    as_json: bool,
) -> None:
    """Drain MEMBER_ID, end its process and wait until it was started again and serves.

    A worker's requests move to other instances; those of the only worker of a model wait and go on when it is back. A
    frontend closes its port and finishes its streams. Who starts the process again is whoever runs it: `penstock up`, a
    container's restart policy, an init system; it ends with exit status 5.

    With --rolling, all members in turn, each once the one before serves again: first the control plane, then the
    workers, then the frontends. The state store is no member: `penstock up` runs it inside itself, and it stays.

    Exit status: 0 all serve again, 1 one does not (the rest is left alone), 2 used wrongly.
    """
    if rolling == (member_id is not None):
        raise click.UsageError("name one member, or give --rolling for all of them")
    report = run(_restart(store, mesh, member_id, role, RestartTimeouts(drain_s, timeout_s)))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return
    for each in report.restarted:
        click.echo(f"{each.role} {each.member_id} serves again after {each.serving_s:.1f} s")
    click.echo(f"{len(report.restarted)} restarted in {report.duration_s:.1f} s")


async def _restart(
    store: str | None, mesh: str, member_id: str | None, role: str | None, timeouts: RestartTimeouts
) -> RestartReport:
    began_s = time.monotonic()
    excepted = (STORE_STAYS,) if member_id is None and role is None else ()
    for line in excepted:
        click.echo(line, err=True)
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        members = chosen(directory, member_id, role)
        done = await restart_in_turn(directory, members, timeouts, lambda line: click.echo(line, err=True))
    return RestartReport(tuple(done), excepted, round(time.monotonic() - began_s, 3))


def chosen(directory: Directory, member_id: str | None, role: str | None) -> Sequence[Member]:
    """Who is restarted, in order. Raises PeerUnavailable for a name that nobody has, ConfigurationError for one that
    members of several roles have."""
    roles = (role,) if role is not None else ROLLING_ORDER
    everyone = [member for each in roles for member in directory.members(each)]
    if member_id is None:
        return in_rolling_order(everyone)
    found = [member for member in everyone if member.member_id == member_id]
    if not found:
        known = ", ".join(member.member_id for member in everyone) or "none"
        raise PeerUnavailable(f"there is no member {member_id!r} in the mesh; there are: {known}")
    if len(found) > 1:
        several = " and ".join(member.role for member in found)
        raise ConfigurationError(f"{member_id!r} is the name of a {several}; say which with --role")
    return found
