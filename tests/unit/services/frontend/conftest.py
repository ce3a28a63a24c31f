from pathlib import Path

import pytest

from tests.unit.services.frontend.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a byte-level tokenizer and a chat template."""
    return write_checkpoint(tmp_path_factory.mktemp("model"))
