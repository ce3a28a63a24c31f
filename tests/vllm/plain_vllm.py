"""Run as a program: what vLLM by itself says under LoRA adapters.

Usage: plain_vllm.py MODEL_PATH, with a JSON list of [prompt, adapter's path or null, max_tokens] on stdin; prints a
JSON list of token ids.
"""

import json
import os
import sys

from engine_worker.engines.vllm.environment import engine_environment, set_missing
from engine_worker.engines.vllm.settings import VllmSettings


def main(model_path: str) -> None:
    asked = json.load(sys.stdin)
    set_missing(os.environ, engine_environment(VllmSettings(model_path), "cpu"))
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model_path,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    )
    paths = sorted({path for _, path, _ in asked if path is not None})
    answers = []
    for prompt, path, max_tokens in asked:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        lora = None if path is None else LoRARequest(path, 1 + paths.index(path), path)
        (output,) = llm.generate(tokens_input(prompt), params, lora_request=lora, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    print("ANSWERS", json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
