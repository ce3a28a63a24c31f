"""The bridge of the connector, as far as it goes without vLLM and a transfer agent."""

import threading

import pytest

from engine_worker.engines.vllm.connector.bridge import CoreBridge
from engine_worker.engines.vllm.connector.messages import Answer, Call, FreeBlocks, FromCore
from engine_worker.kv.settings import KvTransferSettings


async def test_every_call_is_answered_whatever_it_raises() -> None:
    bridge, told = CoreBridge("inproc://nowhere"), list[FromCore]()

    def breaks() -> int:
        raise RuntimeError("an illegal memory access was encountered")

    bridge.free_blocks = breaks
    bridge._send = told.append  # type: ignore[method-assign, assignment]
    await bridge._answer(Call(7, FreeBlocks()))
    (answer,) = told
    assert isinstance(answer, Answer)
    assert (answer.number, answer.error) == (7, "EngineFailed")
    assert "illegal memory access" in answer.message
    bridge._loop.close()


class RanksMemory:
    """The memory of one rank, on a GPU that cannot be had."""

    first_staging, blocks = 9, 12

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def mark_engine(self) -> None:
        self.calls.append(("mark_engine", threading.current_thread().name))

    def use_in_this_thread(self) -> None:
        self.calls.append(("use", threading.current_thread().name))
        raise RuntimeError("no such GPU")


def test_the_agents_thread_takes_its_ranks_gpu_first_and_exports_are_marked_in_the_engines() -> None:
    bridge, memory = CoreBridge("inproc://nowhere"), RanksMemory()
    with pytest.raises(RuntimeError, match="no such GPU"):
        bridge.start(memory, KvTransferSettings())
    bridge.publish("m1", "r1", 0, (1, 2))
    assert memory.calls == [("use", "kv-agent"), ("mark_engine", threading.current_thread().name)]
    bridge._loop.call_soon_threadsafe(bridge._loop.stop)
