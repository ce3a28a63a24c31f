"""The load of the instances as a header of an answer, for balancers in front of several meshes (docs/api.md)."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from services.frontend.mesh_metrics import EngineLoad

FORMAT_HEADER: Final = "endpoint-load-metrics-format"
"""By which a client asks for it: TEXT or JSON, in any case."""
LOAD_HEADER: Final = "endpoint-load-metrics"


def load_header(form: str, load: EngineLoad | None) -> Mapping[str, str]:
    """ORCA's named metrics as vLLM writes them; nothing in a format that it does not know, or without a load."""
    if load is None:
        return {}
    metrics = asdict(load)
    match form.lower():
        case "text":
            return {LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={each}" for name, each in metrics.items())}
        case "json":
            return {LOAD_HEADER: "JSON " + json.dumps({"named_metrics": metrics})}
        case _:
            return {}
