"""`penstock profile`: measure an instance, fit what its work costs, and keep that in the state store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import PROFILES_PREFIX, InstanceProfile
from mesh.errors import ConfigurationError
from services.cli.connection import given_before, mesh_directory, mesh_store, run, same_mesh, store_options
from services.cli.finite_range import POSITIVE
from services.cli.profiling.plan import Configuration, ProfileBounds
from services.cli.profiling.profile_file import (
    decode_profile,
    encode_profile,
    profile_rows,
    read_profile,
    store_profile,
)
from services.cli.profiling.run import OnProgress, find_instance, profile_instance
from services.cli.terminal_table import print_table
from services.cli.time_columns import time_columns

DEFAULTS = ProfileBounds()
COLUMNS = (
    "engine",
    "model",
    "device",
    "GPUs",
    "step error",
    "QoE error",
    "1000 tokens prefill ms",
    "least decode ms",
    "uneven",
)


@click.group(invoke_without_command=True)
@click.option("--instance", "instance_id", help="Which one; default: the first, where all serve the same model.")
@click.option("--model", help="Profile an instance of this model.")
@click.option("--shortest", default=DEFAULTS.shortest_tokens, show_default=True, help="First bucket, tokens.")
@click.option("--longest", default=DEFAULTS.longest_tokens, show_default=True, help="Longest request, tokens.")
@click.option("--largest-batch", default=DEFAULTS.largest_batch, show_default=True, help="Requests in flight.")
@click.option("--answer", default=DEFAULTS.most_answer_tokens, show_default=True, help="Longest answer, tokens.")
@click.option("--seconds", type=POSITIVE, default=DEFAULTS.seconds, show_default=True, help="For each configuration.")
@click.option("--seed", default=DEFAULTS.seed, show_default=True, help="Lengths and held-out parts follow from it.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("profile.json"),
    show_default=True,
    help="Write the profile here; samples stand beside it in OUT.samples.jsonl.",
)
@click.option("--fresh", is_flag=True, help="Measure anew what is in OUT.samples.jsonl already.")
@click.option(
    "--tp",
    type=click.IntRange(1, 64),
    help="GPUs that share each layer of the instance, for a worker that does not say; workers of this version say it.",
)
@click.option("--pp", type=click.IntRange(1, 64), help="Parts that its layers are cut into, likewise.")
@click.option("--in-use", is_flag=True, help="Profile although the instance has other requests.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
@store_options
@click.pass_context
def command(ctx: click.Context, /, out: Path, fresh: bool, as_json: bool, **options: Any) -> None:
    """Drive an instance through length buckets and batch sizes, fit step costs, TTFT and QoE, and store the profile.

    Interrupted, it goes on where it was when called again with the same options. Take the instance out of use while
    it runs: what others ask of it would be measured too.
    """
    if ctx.invoked_subcommand is not None:
        return
    samples_path = out.with_name(out.name + ".samples.jsonl")
    if not out.resolve().parent.is_dir():
        raise click.UsageError(f"cannot write {out}: its directory does not exist")
    if fresh:
        samples_path.unlink(missing_ok=True)
    bounds = ProfileBounds(
        shortest_tokens=options["shortest"],
        longest_tokens=options["longest"],
        largest_batch=options["largest_batch"],
        most_answer_tokens=options["answer"],
        seconds=options["seconds"],
        seed=options["seed"],
    )
    profile = run(_profile(bounds, samples_path, options))
    out.write_bytes(encode_profile(profile))
    _print([profile], as_json)


@command.command()
@click.option("--file", "path", type=click.Path(dir_okay=False, path_type=Path), help="Show the profile in this file.")
@click.option("--json", "as_json", is_flag=True, callback=given_before, help="Print JSON.")
@store_options
def show(path: Path | None, as_json: bool, store: str | None, mesh: str) -> None:
    """Show the profiles of the mesh's state store."""
    _print([read_profile(path)] if path else run(_stored(store, mesh)), as_json)


async def _profile(bounds: ProfileBounds, samples_path: Path, options: dict[str, Any]) -> InstanceProfile:
    async with mesh_store(options["store"], options["mesh"]) as store, mesh_directory(store) as directory:
        member = find_instance(directory, options["instance_id"], options["model"])
        with profile_progress(member.member_id) as progress:
            profile = await profile_instance(
                member, bounds, samples_path, progress, in_use=options["in_use"], shape=_given_shape(options)
            )
        await store_profile(store, profile)
        return profile


def _given_shape(options: dict[str, Any]) -> ReplicaShape | None:
    if options["tp"] is None and options["pp"] is None:
        return None
    return ReplicaShape(options["tp"] or 1, options["pp"] or 1)


async def _stored(store: str | None, mesh: str) -> list[InstanceProfile]:
    async with mesh_store(store, mesh) as opened:
        listing = await opened.range(PROFILES_PREFIX)
    if not listing.entries:
        raise ConfigurationError(f"the store has no profile: make one with penstock profile{same_mesh(store, mesh)}")
    return [decode_profile(entry.value, entry.key) for entry in listing.entries]


def _print(profiles: list[InstanceProfile], as_json: bool) -> None:
    if as_json:
        for profile in profiles:
            click.echo(encode_profile(profile), nl=False)
        return
    table = Table(*COLUMNS)
    for row in profile_rows(profiles):
        table.add_row(*row)
    print_table(table)


@contextmanager
def profile_progress(instance_id: str) -> Iterator[OnProgress]:
    """A bar on stderr, fed by `profile_instance`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *time_columns())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(instance_id, total=None)

        def update(configuration: Configuration | None, done: int, total: int) -> None:
            what = "fitting"
            if configuration is not None:
                what = f"{configuration.shortest_tokens}-{configuration.below_tokens} tokens x {configuration.batch}"
            bar.update(task, description=f"{instance_id} {what}", completed=done, total=total)

        yield update
