import pytest
from click.testing import CliRunner

from mesh.errors import ConfigurationError
from services.cli.main import penstock
from services.frontend.requests.api_keys import parse_line


def test_a_key_is_made_with_its_bounds() -> None:
    options = ("--tokens-per-min", "1e6", "--expires", "2027-12-31", "--model", "chat", "--model", "a", "--operator")
    result = CliRunner().invoke(penstock, ["key", "alice", *options, "--lowest-priority", "-3"], catch_exceptions=False)
    line = result.stdout.strip()
    key = parse_line(line, "here")
    assert (key.name, key.tokens_per_min, str(key.expires), key.models) == ("alice", 1e6, "2027-12-31", {"chat", "a"})
    assert (key.is_operator, key.lowest_priority, key.concurrency) == (True, -3, None)
    assert "sk-penstock-" in result.stderr
    assert "sk-penstock-" not in line


def test_a_model_that_no_line_can_hold_is_refused() -> None:
    for model in ("a:b", "a:60", ":", "a,,b"):
        with pytest.raises(ConfigurationError, match="new key"):
            CliRunner().invoke(penstock, ["key", "alice", "--model", model], catch_exceptions=False)
