"""Starting another program leaves gRPC alone."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

_SAYS = """
import importlib, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Finder())
os.environ.pop("GRPC_ENABLE_FORK_SUPPORT", None)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize("roles", ["services.cli.main services.cli.serve", "services.cli.main services.cli.up"])
def test_grpc_is_imported_without_its_handlers_for_forks(roles: str) -> None:
    said = subprocess.run([sys.executable, "-c", _SAYS, *roles.split()], capture_output=True, text=True, check=True)
    assert said.stdout == "false\n"
