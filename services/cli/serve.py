"""`penstock serve ROLE`: run one role in this process."""

import asyncio
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
import uvloop

from mesh.role import Role, RoleSettings, run_role
from mesh.run_file import find_mesh
from services.cli.connection import DEFAULT_MESH, mesh_name
from services.cli.settings_options import settings_from, settings_options

# Role: its class and its settings. A role's module is imported only when it is served.
ROLES = {
    "frontend": ("services.frontend.role:FrontendRole", "services.frontend.settings:FrontendSettings"),
    "gateway": ("services.frontend.gateway.role:GatewayRole", "services.frontend.gateway.settings:GatewaySettings"),
    "scheduler": ("controlplane.scheduler.role:SchedulerRole", "controlplane.scheduler.settings:SchedulerSettings"),
    "monitor": ("controlplane.monitor.role:MonitorRole", "controlplane.monitor.settings:MonitorSettings"),
    "predictor": ("services.predictor.role:PredictorRole", "services.predictor.settings:PredictorSettings"),
    "cascade": ("services.cascade.role:CascadeRole", "services.cascade.settings:CascadeSettings"),
    "planner": ("controlplane.planner.role:PlannerRole", "controlplane.planner.settings:PlannerSettings"),
    "operator": ("services.operator.role:OperatorRole", "services.operator.settings:OperatorSettings"),
    "worker": ("engine_worker.role:WorkerRole", "engine_worker.settings:WorkerSettings"),
}


class RoleGroup(click.Group):
    """Makes the subcommand of a role from its settings when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ROLES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command that serves a role, or None if there is no such role."""
        return _role_command(cmd_name) if cmd_name in ROLES else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in --help, without importing every role."""
        with formatter.section("Roles"):
            formatter.write_text(", ".join(ROLES))


@click.command(cls=RoleGroup)
def command() -> None:
    """Run one role of the mesh in this process.

    Every option can be given as PENSTOCK_SERVE_<ROLE>_<OPTION> in the environment.
    """


def parse_settings(role: str, arguments: Sequence[str]) -> tuple[RoleSettings, Any]:
    """Parse the arguments of `penstock serve ROLE`: the settings that all roles have, and this role's own."""
    with _role_command(role).make_context(role, list(arguments)) as context:
        return _settings(role, context.params)


def _settings(role: str, options: Mapping[str, Any]) -> tuple[RoleSettings, Any]:
    found = find_mesh(options["store"], options["mesh"], options["identity"])
    common = settings_from(RoleSettings, {**options, "store_url": found.store_url, "identity": found.identity})
    return common, settings_from(_load(ROLES[role][1]), options)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _role_command(name: str) -> click.Command:
    role_path, settings_path = ROLES[name]
    settings_class = _load(settings_path)

    @click.command(name, context_settings={"auto_envvar_prefix": f"PENSTOCK_SERVE_{name.upper()}"})
    @click.option("--store", help="State store; default: PENSTOCK_STORE, then the mesh running on this machine.")
    @click.option(
        "--mesh", callback=mesh_name, default=DEFAULT_MESH, show_default=True, help="Name of the mesh on this machine."
    )
    @settings_options(RoleSettings, hide=frozenset({"store_url"}))
    @settings_options(settings_class)
    def serve(**options: Any) -> None:
        common, settings = _settings(name, options)
        role: Role = _load(role_path)(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(run_role(role, common))
        sys.exit(status)

    serve.help = f"Run a {name} until SIGTERM, which drains it."
    return serve
