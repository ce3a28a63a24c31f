"""deploy/compose.yaml as Compose reads it: variables filled in, anchors merged."""

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def load_compose(variables: dict[str, str] | None = None) -> dict[str, Any]:
    """The file with `${NAME:-default}` replaced from `variables`."""
    values = variables or {}
    text = (DEPLOY / "compose.yaml").read_text()
    filled = _VARIABLE.sub(lambda match: values.get(match[1], match[2]), text)
    compose: dict[str, Any] = yaml.safe_load(filled)
    return compose


def penstock_services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The services that run a role, by name."""
    return {
        name: service for name, service in compose["services"].items() if service.get("command", [""])[0] == "serve"
    }


def option(service: dict[str, Any], name: str) -> str:
    """The value of a command-line option of a service."""
    command = service["command"]
    value: str = command[command.index(name) + 1]
    return value
