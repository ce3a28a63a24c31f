"""The hub of the connector, as far as it goes without vLLM and a transfer agent."""

from engine_worker.engines.vllm.connector.hub import CoreHub
from engine_worker.engines.vllm.connector.messages import Answer, Call, FreeBlocks, FromCore


async def test_every_call_is_answered_whatever_it_raises() -> None:
    hub, told = CoreHub("inproc://nowhere"), list[FromCore]()

    def breaks() -> int:
        raise RuntimeError("an illegal memory access was encountered")

    hub.free_blocks = breaks
    hub._tell = told.append  # type: ignore[method-assign, assignment]
    await hub._answer(Call(7, FreeBlocks()))
    (answer,) = told
    assert isinstance(answer, Answer)
    assert (answer.number, answer.error) == (7, "EngineFailed")
    assert "illegal memory access" in answer.message
    hub._loop.close()
