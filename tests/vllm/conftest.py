"""Everything here needs vLLM; without it, nothing is collected."""

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from engine_worker.engines.vllm.engine import VllmEngine
from penstock.testing.engine import EngineDriver
from tests.vllm.moving import SETTINGS, Side
from tests.vllm.tiny_model import make_tiny_llama

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's directory."""
    path = tmp_path_factory.mktemp("tiny-llama")
    make_tiny_llama(path)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    """Two engines for all files whose tests run on the session's loop. To start one takes 18 s of CPU, most of it for
    imports."""
    engines = VllmEngine(SETTINGS), VllmEngine(SETTINGS)
    limits = [await engine.start() for engine in engines]  # not at once: vLLM renews metrics of the whole process
    source, target = (
        Side(engine, EngineDriver(engine, limit, 60.0)) for engine, limit in zip(engines, limits, strict=True)
    )
    yield source, target
    await source.driver.close()
    await target.driver.close()
