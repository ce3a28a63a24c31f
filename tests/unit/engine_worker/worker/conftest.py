from collections.abc import AsyncIterator

import pytest

from tests.unit.engine_worker.worker.running_worker import RunningWorker, running_worker


@pytest.fixture
async def worker() -> AsyncIterator[RunningWorker]:
    async with running_worker() as running:
        yield running
