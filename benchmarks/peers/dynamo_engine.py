"""An engine of Dynamo's own kind. Run by the Python of Dynamo's environment.

dynamo_engine.py MODEL CHECKPOINT STEP_MS
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

FIRST_TOKEN_ID = 300


async def serve(model: str, checkpoint: str, step_s: float) -> None:
    """Answer a token every `step_s`."""
    loop = asyncio.get_running_loop()
    endpoint = DistributedRuntime(loop, "file", "tcp").endpoint("bench.backend.generate")

    async def generate(request: dict[str, Any], context: Any = None) -> AsyncIterator[dict[str, Any]]:
        count, due_s = (request.get("stop_conditions") or {}).get("max_tokens") or 16, loop.time()
        for index in range(count):
            due_s += step_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            token: dict[str, Any] = {"token_ids": [FIRST_TOKEN_ID + index % 200]}
            yield token | ({"finish_reason": "length"} if index == count - 1 else {})

    kinds = ModelType.Chat | ModelType.Completions
    registered = register_model(
        ModelInput.Tokens,
        kinds,
        endpoint,
        checkpoint,
        model,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=16,
    )
    await asyncio.gather(endpoint.serve_endpoint(generate), registered)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1e3))
