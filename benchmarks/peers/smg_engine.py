"""Engines of vLLM's gRPC kind, as SMG speaks to them. Run by the Python of SMG's environment, which has the protobufs.

smg_engine.py MODEL CHECKPOINT STEP_MS PORT...
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

FIRST_TOKEN_ID = 300


class Engine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers a token every `step_s`."""

    def __init__(self, model: str, checkpoint: str, step_s: float) -> None:
        self._model, self._checkpoint, self._step_s = model, checkpoint, step_s

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        due_s, prompt = loop.time(), len(request.tokenized.input_ids)
        tokens = [FIRST_TOKEN_ID + index % 200 for index in range(request.sampling_params.max_tokens or 16)]
        for count, token in enumerate(tokens, 1):
            due_s += self._step_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            if request.stream:
                chunk = vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=[token], prompt_tokens=prompt, completion_tokens=count
                )
                yield vllm_engine_pb2.GenerateResponse(chunk=chunk)
        whole = vllm_engine_pb2.GenerateComplete(
            output_ids=tokens, finish_reason="length", prompt_tokens=prompt, completion_tokens=len(tokens)
        )
        yield vllm_engine_pb2.GenerateResponse(complete=whole)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="ok")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=self._checkpoint,
            tokenizer_path=self._checkpoint,
            served_model_name=self._model,
            is_generation=True,
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            max_context_length=65536,
            max_req_input_len=65000,
            vocab_size=8000,
            eos_token_ids=[1],
            default_sampling_params_json="{}",
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetServerInfoResponse(server_type="vllm-grpc")

    async def Abort(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.AbortResponse()

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetLoadsResponse()


async def serve(model: str, checkpoint: str, step_s: float, ports: list[str]) -> None:
    """All of them in this process."""
    servers = []
    for port in ports:
        server = grpc.aio.server()
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Engine(model, checkpoint, step_s), server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        servers.append(server)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1e3, sys.argv[4:]))
