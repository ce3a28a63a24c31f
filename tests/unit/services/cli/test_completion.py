import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from services.cli.completion import PROGRAM, SHELLS, VARIABLE
from services.cli.main import penstock

pytestmark = pytest.mark.live


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_that_asks_penstock(shell: str) -> None:
    result = CliRunner().invoke(penstock, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert VARIABLE in result.output
    assert PROGRAM in result.output


@pytest.mark.process
def test_commands_and_options_are_completed() -> None:
    def completed(words: str, place: int) -> list[str]:
        asked = {**os.environ, VARIABLE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        command = (sys.executable, "-c", "from services.cli.main import main; main()")
        return subprocess.run(command, env=asked, capture_output=True, text=True, timeout=60, check=True).stdout.split()

    assert "plain,status" in completed("penstock sta", 1)
    assert "plain,--watch" in completed("penstock status --w", 2)
