"""`penstock plugins`: the policies, engines and judges that this machine's packages give."""

import json
from typing import Any

import click

from controlplane.policies.registry import POLICIES
from engine_worker.engine_choice import ENGINES
from mesh.plugins import PluginRegistry
from services.cascade.judges.parse import JUDGES

EXIT_UNUSABLE = 1
REGISTRIES: tuple[PluginRegistry[Any], ...] = (POLICIES, ENGINES, JUDGES)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool) -> None:
    """List placement policies, engines and judges: Penstock's own and those of packages that are installed here.

    Every package is imported. The JSON form is {"plugins": [{"kind", "name", "source"}], "unusable": [{"kind", "name",
    "source", "reason"}]}, where the source is "penstock" or a package with its version. Exit status: 0 done, 1 a
    plugin cannot be used.
    """
    listed = listing()
    if as_json:
        click.echo(json.dumps(listed, indent=2))
    else:
        for plugin in listed["plugins"]:
            click.echo(f"{plugin['kind']:<18}{plugin['name']:<24}{plugin['source']}")
        for plugin in listed["unusable"]:
            click.echo(f"cannot be used: {plugin['kind']} {plugin['name']} of {plugin['source']}: {plugin['reason']}")
    ctx.exit(EXIT_UNUSABLE if listed["unusable"] else 0)


def listing() -> dict[str, list[dict[str, str]]]:
    """The plugins as `penstock plugins --json` prints them."""
    plugins = [
        {"kind": registry.noun, "name": name, "source": registry.source(name)}
        for registry in REGISTRIES
        for name in registry.usable()
    ]
    unusable = [
        {"kind": registry.noun, "name": failure.name, "source": failure.source, "reason": failure.reason}
        for registry in REGISTRIES
        for failure in registry.failures()
    ]
    return {"plugins": plugins, "unusable": unusable}
