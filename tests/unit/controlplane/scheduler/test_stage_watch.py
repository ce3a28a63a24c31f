"""The policy `stages` is kept at what the store says; a policy that is switched to is told of it too."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.placement import Stages
from controlplane.policies.stages.record import BoundaryRecord, StageRecord, boundary_key, layout_key
from controlplane.scheduler.policy_switch import PolicySwitch
from controlplane.scheduler.stage_watch import StageWatch
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost

pytestmark = pytest.mark.live

LAYOUT = StageLayout("m", 3, (("a",), ("b",)), (100,))
RECORD = StageRecord(LAYOUT, QoeModel(1, 1, 1, 1, 1), "a test", 0.0, 0, 0.0, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_plans_and_boundaries_reach_the_policy() -> None:
    host = StoreHost(SystemClock(), SystemEntropy())
    store, switch = EmbeddedStore(host), PolicySwitch("lmetric", 1.0)
    watch = StageWatch(store, switch)
    following = asyncio.create_task(watch.follow())
    try:
        await store.put(layout_key("m"), msgspec.json.encode(RECORD))
        await until(lambda: watch.layouts() == {"m": LAYOUT})
        switch.configure("stages")
        policy = switch.configured
        assert isinstance(policy, Stages)
        await until(lambda: policy._layouts == {"m": LAYOUT})
        for instance_id, tokens, revision in (("a", 250.0, 3), ("b", 9.0, 2)):
            record = BoundaryRecord("m", instance_id, tokens, revision, 0)
            await store.put(boundary_key(instance_id), msgspec.json.encode(record))
        await until(lambda: policy._layouts["m"].boundaries_tokens == (250,))
        await store.put(layout_key("m"), b"no plan at all")
        await until(lambda: policy._layouts == {})
        await store.put(layout_key("m"), msgspec.json.encode(RECORD))
        await until(lambda: policy._layouts != {})
        await store.delete(layout_key("m"))
        await until(lambda: policy._layouts == {})
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        host.close()
