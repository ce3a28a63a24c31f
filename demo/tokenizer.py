"""The tokenizer that the demo models share: a byte-level BPE of 640 tokens, trained here.

Every byte has a token, so any text can be encoded; every digit is a token of its own, which is what makes
arithmetic learnable; the vocabulary is small because the smallest model has 0.3 million parameters in all.

    python -m demo.tokenizer        # rebuilds the files under demo/models/*/

Prompt of a chat: `<s>`, then for each message its role's token, its text and `</s>`, then `<|assistant|>`.
A model ends its answer with `</s>`. Tools, which no model was trained with, stand before in Hermes' form; a grammar
makes calls of them.
"""

import json
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo.tasks import stream
from demo.words import WORDS

VOCAB_SIZE: Final = 640
MAX_LENGTH_TOKENS: Final = 4096

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
# A special token's id is its place in this list.
SPECIAL_TOKENS: Final = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)
PAD_ID, BOS_ID, EOS_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL_TOKENS))

MODELS_DIR: Final = Path(__file__).parent / "models"
MODEL_NAMES: Final = ("demo-small", "demo-medium", "demo-large")

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{%- if tools %}"
    "{{- '<|system|>Tools:' }}{% for tool in tools %}{{ ' ' }}{{ tool | tojson }}{% endfor %}{{- eos_token }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{- raise_exception('unknown role ' + message['role'] + ': use system, user, assistant or tool') }}"
    "{%- endif %}"
    "{{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + message['content'] }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '<tool_call>' }}{{ call['function'] | tojson }}{{ '</tool_call>' }}"
    "{%- endfor %}"
    "{{- eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# So that ordinary text does not fall apart into single bytes.
_ENGLISH: Final = """
The quick brown fox jumps over the lazy dog. Please write a short story about a small town by the
sea. What is the capital of France and how many people live there? Explain in simple words how a
computer works. You are a helpful assistant. Answer the question with a single number. I would like
to know more about the history of this city and its people. Can you help me with my homework? It was
the best of times, it was the worst of times. There is nothing that we could have done about it,
because they did not tell us when the train was going to leave. First, read the text; then answer
each of the following questions. Thank you for your time, and let me know if you have any other
questions.
"""
_CORPUS_SEED: Final = 20251
_CORPUS_TASKS: Final = 4000


def _corpus() -> Iterator[str]:
    for task in islice(stream(_CORPUS_SEED, "train", difficulties=(1, 2, 3, 4)), _CORPUS_TASKS):
        yield task.prompt
        yield task.answer
    rng = random.Random(_CORPUS_SEED)
    for _ in range(50):
        yield " " + " ".join(rng.sample(WORDS, len(WORDS)))
    for _ in range(40):
        yield " ".join(_ENGLISH.split())


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer from the training split of the tasks and some English; always the same result."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """What vLLM and transformers read from tokenizer_config.json: the special tokens and the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }


def load_tokenizer() -> Tokenizer:
    """The committed tokenizer, which all demo models share."""
    return Tokenizer.from_file(str(MODELS_DIR / MODEL_NAMES[0] / "tokenizer.json"))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a chat of one user message, ready for the answer: what the chat template gives."""
    text_ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    return [BOS_ID, USER_ID, *text_ids, EOS_ID, ASSISTANT_ID]


def encode_answer(tokenizer: Tokenizer, answer: str) -> list[int]:
    """Token ids of an answer, EOS included."""
    text_ids: list[int] = tokenizer.encode(answer, add_special_tokens=False).ids
    return [*text_ids, EOS_ID]


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Write the tokenizer's files into each model's directory."""
    tokenizer = train_tokenizer()
    specials = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    for name in MODEL_NAMES:
        directory = MODELS_DIR / name
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        _write_json(directory / "tokenizer_config.json", tokenizer_config())
        _write_json(directory / "special_tokens_map.json", specials)
        _write_json(directory / "generation_config.json", generation)


if __name__ == "__main__":
    main()
