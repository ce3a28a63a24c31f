"""What `penstock policy` refuses before it asks anybody."""

import pytest
from click.testing import CliRunner

from services.cli.policy import command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["linear", "--set", "lambda"], "'lambda' is not PARAMETER=NUMBER"),
        (["linear", "--set", "lambda=high"], "'lambda=high' is not PARAMETER=NUMBER"),
        (["linear", "--set", "=0.5"], "'=0.5' is not PARAMETER=NUMBER"),
        (["linear", "--set", "lambda=0.5", "--set", "lambda=0.6"], "lambda is set twice"),
        (["--set", "lambda=0.7"], "--set needs the NAME of a policy"),
    ],
)
def test_settings_must_be_numbers_of_a_named_policy(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert says in result.output
