"""Commands of the documentation that only look, as they stand there, against a running mesh."""

import shlex

import pytest

from tests.mesh.running_mesh import RunningMesh
from tests.shown_commands import COMMAND_LINES

LOOKING = {
    "cascade",
    "completion bash",
    "lora list",
    "plan show",
    "plugins",
    "policy",
    "rescheduler",
    "stages",
    "status",
    "top --json --count 1",
}
SHOWN = sorted({line for _, line in COMMAND_LINES} & LOOKING)


def test_they_are_shown() -> None:
    assert len(SHOWN) > 5


@pytest.mark.parametrize("line", SHOWN)
def test_a_shown_command_does_what_it_is_shown_for(mesh: RunningMesh, line: str) -> None:
    done = mesh.cli(*shlex.split(line))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
