"""The bridge of the connector, as far as it goes without vLLM and a transfer agent."""

from engine_worker.engines.vllm.connector.bridge import CoreBridge
from engine_worker.engines.vllm.connector.messages import Answer, Call, FreeBlocks, FromCore


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
