"""Everything here needs vLLM; without it, nothing is collected."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.tiny_model import make_tiny_llama

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's directory."""
    path = tmp_path_factory.mktemp("tiny-llama")
    make_tiny_llama(path)
    return path
