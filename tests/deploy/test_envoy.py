"""The configuration of Envoy that is shown; tests/mesh/test_gateway.py runs it."""

from pathlib import Path
from typing import Any, Final

import yaml

ENVOY = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"
VLLM_CLOSES_S: Final = 5.0
"""The default of VLLM_HTTP_TIMEOUT_KEEP_ALIVE."""


def test_no_request_is_sent_over_a_connection_that_its_server_may_be_closing() -> None:
    configuration: Any = yaml.safe_load(ENVOY.read_text())
    models = next(each for each in configuration["static_resources"]["clusters"] if each["name"] == "models")
    (options,) = models["typed_extension_protocol_options"].values()
    assert float(options["common_http_protocol_options"]["idle_timeout"].rstrip("s")) < VLLM_CLOSES_S
