"""How many transfers run at once, who waits, and who may touch which block."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv.grants import BlockGrants
from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.slots import TransferSlots
from engine_worker.kv.staging import StagingRing
from mesh.errors import KvTransferRefused

MEMORY = RegionMemory([np.zeros((1, 8), np.uint8)], model="m", dtype="uint8", block_tokens=1)


def slots_of(parallel: int, queued: int) -> TransferSlots:
    return TransferSlots(parallel, queued, lambda: StagingRing(MEMORY, 1, 8))


class Transfer:
    """Takes a slot and holds it until it is told to end."""

    def __init__(self, slots: TransferSlots, log: list["Transfer"]) -> None:
        self.end = asyncio.Event()
        self.ring: StagingRing | None = None
        self.task = asyncio.create_task(self._run(slots, log))

    async def _run(self, slots: TransferSlots, log: list["Transfer"]) -> None:
        async with slots.take() as ring:
            self.ring = ring
            log.append(self)
            await self.end.wait()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from(["start", "end", "cancel"]), st.integers(0, 20)), max_size=40),
)
def test_never_more_than_allowed_and_in_order(parallel: int, queued: int, steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        slots = slots_of(parallel, queued)
        started: list[Transfer] = []
        live: list[Transfer] = []
        for action, pick in steps:
            if action == "start":
                is_full = slots.running == parallel and slots.queued == queued
                transfer = Transfer(slots, started)
                await turn()
                assert is_full == (transfer.task.done() and isinstance(transfer.task.exception(), KvTransferRefused))
                if not is_full:
                    live.append(transfer)
            elif live:
                transfer = live.pop(pick % len(live))
                if action == "end" and transfer.ring is not None:
                    transfer.end.set()
                else:
                    transfer.task.cancel()
                await turn()
                assert transfer.task.done()
            slots.validate()
            holding = [transfer for transfer in live if transfer.ring is not None]
            assert len(holding) == slots.running == min(parallel, len(live))
            assert slots.queued == len(live) - len(holding) <= queued
            assert live[: len(holding)] == holding  # first come, first served
            assert len({id(transfer.ring) for transfer in holding}) == len(holding)
        for transfer in live:
            transfer.task.cancel()
        await asyncio.gather(*(transfer.task for transfer in live), return_exceptions=True)
        assert (slots.running, slots.queued) == (0, 0)

    asyncio.run(scenario())


async def test_a_slot_given_to_a_cancelled_waiter_is_passed_on() -> None:
    slots = slots_of(1, 2)
    log: list[Transfer] = []
    first, second, third = (Transfer(slots, log) for _ in range(3))
    await turn()
    first.end.set()
    while slots.queued == 2:  # noqa: ASYNC110  to the very turn in which the second is given its slot
        await asyncio.sleep(0)
    second.task.cancel()  # has the slot, but has not run since
    await turn()
    assert third.ring is not None
    third.end.set()
    await third.task


async def test_a_waiter_that_is_cancelled_in_the_turn_in_which_a_slot_comes_free_is_just_cancelled() -> None:
    slots = slots_of(1, 2)
    log: list[Transfer] = []
    first, second, third = (Transfer(slots, log) for _ in range(3))
    await turn()
    first.end.set()
    second.task.cancel()  # its wait is cancelled, but it has not run since, when the first gives its slot back
    await turn()
    assert second.task.cancelled()
    assert third.ring is not None
    third.end.set()
    await third.task


def test_only_open_blocks_may_be_touched() -> None:
    grants = BlockGrants("exported")
    grants.open("m1", [1, 2])
    grants.open("m1", [2, 3])
    grants.open("m2", [9])
    assert grants.refusal("m1", [3, 1]) == ""
    assert "blocks [9] (1 in all) are not exported under 'm1'" in grants.refusal("m1", [1, 9])
    assert grants.blocks == 4
    grants.close("m1")
    grants.close("m1")
    with pytest.raises(KvTransferRefused, match="nothing is exported under 'm1'"):
        grants.check("m1", [1])
    assert grants.ids == ("m2",)
