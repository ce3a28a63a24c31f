"""A checkpoint to run vLLM on: random weights, 160,000 parameters, made in a second."""

import random
from pathlib import Path

VOCABULARY = range(3, 512)
EOS_TOKEN_ID = 1


def make_tiny_llama(path: Path, *, vocabulary: int = VOCABULARY.stop, context: int = 1024) -> None:
    """Write a Llama checkpoint without tokenizer. Large weights keep greedy choices far apart."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=2,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)


def greedy_answer(path: Path, prompts: list[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
    """What transformers' implementation answers to prompts of one length, going on after the end of sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    inputs = torch.tensor(prompts)
    with torch.no_grad():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=2,
        )
    return [tuple(row[inputs.shape[1] :].tolist()) for row in output]


def find_ending_prompt(path: Path) -> tuple[int, ...]:
    """A prompt whose greedy answer reaches the end of sequence after a few and within a hundred tokens."""
    choose = random.Random(0)
    for _ in range(20):
        prompts = [tuple(choose.choices(VOCABULARY, k=12)) for _ in range(64)]
        for prompt, answer in zip(prompts, greedy_answer(path, prompts, 100), strict=True):
            if EOS_TOKEN_ID in answer[4:] and EOS_TOKEN_ID not in answer[:4]:
                return prompt
    raise AssertionError("no random prompt of the tiny model ends; change its seed")
