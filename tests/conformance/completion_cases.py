"""Completions: what they have of their own, and the parameters that they share with chats in short."""

from typing import Any

from tests.conformance.case import COMPLETIONS, Case
from tests.conformance.chat_cases import SUM

PROMPT = "<|user|>Add 4991 and 6299.</s><|assistant|>"
SCORING = "/generative_scoring"
EVERY_CHUNK = {"include_usage": True, "continuous_usage_stats": True}


def completion(name: str, **fields: Any) -> Case:
    """A greedy completion of a few tokens, unless the fields say otherwise; a field that is `...` is left out."""
    body = {"model": "demo-large", "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | fields
    return Case(f"completions: {name}", COMPLETIONS, {key: value for key, value in body.items() if value is not ...})


def streamed(name: str, **fields: Any) -> Case:
    return completion(f"{name}, streamed", **{"stream": True, "stream_options": {"include_usage": True}, **fields})


def both(name: str, **fields: Any) -> list[Case]:
    """Whole and as a stream."""
    return [completion(name, **fields), streamed(name, **fields)]


def scored(name: str, **fields: Any) -> Case:
    """Generative scoring of two items; a field that is `...` is left out."""
    body: dict[str, Any] = {"model": "demo-large", "query": "Add 4991", "items": [" and 6299", " and 1"]}
    given = {**body, "label_token_ids": [300, 301, 302], **fields}
    return Case(
        f"scores: generative, {name}", SCORING, {key: value for key, value in given.items() if value is not ...}
    )


CASES = [
    *both("plain"),
    *both("no limit", max_tokens=...),
    completion("model left out", model=...),
    completion("model null", model=None),
    completion("model unknown", model="nobody"),
    completion("prompt missing", prompt=...),
    completion("prompt null", prompt=None),
    completion("prompt empty", prompt=""),
    completion("prompt of no texts", prompt=[]),
    *both("prompts", prompt=[PROMPT, "Count from 7"]),
    *both("prompt of tokens", prompt=[1, 20, 30, 40]),
    *both("prompts of tokens", prompt=[[1, 20, 30], [1, 40]]),
    completion("prompt of no tokens", prompt=[[]]),
    completion("prompt of an unknown token", prompt=[1, 100_000]),
    completion("prompt of a negative token", prompt=[1, -1]),
    completion("prompts of both kinds", prompt=["Add 1", [1, 20]]),
    completion("prompt_embeds", prompt_embeds="abc"),
    completion("prompt beyond the context", prompt="Add 1 and 2. " * 2000),
    completion("max_tokens 0", max_tokens=0),
    completion("max_tokens 0, echo", max_tokens=0, echo=True),
    completion("max_tokens 0, echo, logprobs", max_tokens=0, echo=True, logprobs=1),
    completion("max_tokens null", max_tokens=None),
    completion("max_tokens beyond the context", max_tokens=100_000),
    completion("max_tokens negative", max_tokens=-5),
    *both("n", n=2),
    completion("n and prompts", n=2, prompt=[PROMPT, "Count from 7"]),
    completion("best_of", best_of=1),
    completion("best_of above n", best_of=2),
    *both("echo", echo=True),
    *both("logprobs 0", logprobs=0),
    *both("logprobs 1", logprobs=1),
    *both("logprobs 3", logprobs=3),
    completion("logprobs true", logprobs=True),
    completion("logprobs false", logprobs=False),
    completion("logprobs 21", logprobs=21),
    completion("logprobs -1", logprobs=-1, max_tokens=1),
    completion("logprobs -2", logprobs=-2),
    *both("logprobs to the end", logprobs=1, max_tokens=40),
    *both("logprobs, echo", logprobs=1, echo=True),
    completion("logprobs, stop", logprobs=1, stop="9"),
    completion("logprobs, tokens as ids", logprobs=1, return_tokens_as_token_ids=True),
    completion("prompt_logprobs", prompt_logprobs=1),
    completion("prompt_logprobs 0", prompt_logprobs=0),
    completion("prompt_logprobs -1", prompt_logprobs=-1, max_tokens=1),
    streamed("prompt_logprobs", prompt_logprobs=1),
    *both("logprob_token_ids", logprobs=1, logprob_token_ids=[300, 301]),
    completion("logprob_token_ids, no rivals", logprobs=0, logprob_token_ids=[300, 301]),
    completion("logprob_token_ids without logprobs", logprob_token_ids=[300, 301]),
    completion("logprob_token_ids, echo", logprobs=1, logprob_token_ids=[300, 301], echo=True),
    completion(
        "logprob_token_ids, echo of the prompt alone", logprobs=1, logprob_token_ids=[300], echo=True, max_tokens=0
    ),
    completion("logprob_token_ids, prompts", logprobs=1, logprob_token_ids=[300], prompt=[PROMPT, "Count from 7"]),
    *both("token ids", return_token_ids=True),
    *both("token ids to the end", return_token_ids=True, max_tokens=40),
    completion("token ids, prompts", return_token_ids=True, prompt=[PROMPT, "Count from 7"]),
    *both("token ids, echo", return_token_ids=True, echo=True),
    *both("token ids, echo, logprobs", return_token_ids=True, echo=True, logprobs=1),
    *both("token ids, echo, logprobs of the prompt", return_token_ids=True, echo=True, logprobs=1, prompt="Hello"),
    *both("echo of special tokens", echo=True, prompt=[1, 45, 293, 84]),
    *both("echo of nothing but special tokens", echo=True, logprobs=1, prompt=[0, 0, 0]),
    completion("echo, truncated", echo=True, truncate_prompt_tokens=6),
    completion("prompt of an empty text", prompt=[""]),
    completion("prompt_embeds empty", prompt_embeds=[]),
    completion("stream_options empty", stream_options={}),
    *both("stop", stop=["9"]),
    *both("stop string shown", stop=["9"], include_stop_str_in_output=True),
    *both("stop_token_ids", stop_token_ids=[300, 301, 302]),
    completion("ignore_eos", ignore_eos=True, max_tokens=20),
    completion("min_tokens", min_tokens=15, max_tokens=20),
    completion("special tokens shown", skip_special_tokens=False, max_tokens=40),
    completion("suffix", suffix="!"),
    completion("suffix empty", suffix=""),
    completion("user", user="ann"),
    completion("seed", seed=7, temperature=1, max_tokens=1),
    completion("logit_bias", logit_bias={"300": 100}),
    completion("allowed_token_ids", allowed_token_ids=[300, 301]),
    completion("bad_words", bad_words=["9", "1"]),
    completion("add_special_tokens", add_special_tokens=False, return_token_ids=True),
    completion("truncate_prompt_tokens", truncate_prompt_tokens=4, return_token_ids=True, max_tokens=1),
    completion(
        "truncation_side", truncate_prompt_tokens=4, truncation_side="right", return_token_ids=True, max_tokens=1
    ),
    completion("unknown parameter", mood="good"),
    completion("watermarking", watermarking=False),
    completion("repetition_detection", repetition_detection={"max_pattern_size": 4, "min_count": 3}),
    completion("kv_transfer_params", kv_transfer_params={}),
    completion("vllm_xargs", vllm_xargs={"a": 1}),
    completion("cache_salt", cache_salt="c2FsdA"),
    completion("cache_salt with a slash", cache_salt="a/b"),
    completion("priority 0", priority=0),
    completion("request_id", request_id="mine"),
    completion("session_id", session_id="mine"),
    completion("thinking_token_budget", thinking_token_budget=10),
    completion("stream_interval", stream_interval=4),
    completion("temperature negative", temperature=-0.1),
    completion("top_p 1.5", top_p=1.5),
    streamed("usage in every chunk", stream_options=EVERY_CHUNK),
    streamed("usage in every chunk, logprobs", stream_options=EVERY_CHUNK, logprobs=1),
    streamed("usage in every chunk, prompts", stream_options=EVERY_CHUNK, prompt=[PROMPT, "Count from 7"]),
    streamed("usage of chunks alone", stream_options={"include_usage": False, "continuous_usage_stats": True}),
    streamed("no usage", stream_options={"include_usage": False}),
    streamed("stream_options null", stream_options=None),
    completion("stream_options of no stream", stream_options={"include_usage": True}),
    *both("response_format json_object", response_format={"type": "json_object"}),
    completion(
        "response_format json_schema",
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SUM}},
    ),
    completion("structured_outputs choice", structured_outputs={"choice": ["yes", "no"]}),
    completion("structured_outputs regex", structured_outputs={"regex": "[0-9]{3}"}),
    completion("structured_outputs grammar", structured_outputs={"grammar": 'root ::= "yes" | "no"'}),
    completion("structured_outputs wrong regex", structured_outputs={"regex": "["}),
    *both("beam search", use_beam_search=True, n=2, max_tokens=4),
    completion("beam search, prompts", use_beam_search=True, n=2, max_tokens=4, prompt=[PROMPT, "Count from 7"]),
    completion(
        "beam search, prompts of tokens", use_beam_search=True, n=2, max_tokens=4, prompt=[[1, 20, 30], [1, 40]]
    ),
    completion("beam search, logprobs", use_beam_search=True, n=2, max_tokens=4, logprobs=1),
    Case("completions: no JSON", COMPLETIONS, raw=b"{"),
    scored("plain"),
    scored("among all tokens", apply_softmax=False),
    scored("item first", item_first=True),
    scored("no special tokens", add_special_tokens=False),
    scored("tokens", query=[1, 20, 30], items=[[40], [50, 60]]),
    scored("a text and tokens", items=[[40], [50, 60]]),
    scored("texts and tokens", items=["a", [50, 60]]),
    scored("one label", label_token_ids=[300]),
    scored("a label twice", label_token_ids=[300, 301, 300]),
    scored("many labels", label_token_ids=list(range(300, 340)), apply_softmax=False),
    scored("more labels than there may be", label_token_ids=list(range(300, 430))),
    scored("no labels", label_token_ids=[]),
    scored("labels missing", label_token_ids=...),
    scored("an unknown label", label_token_ids=[100_000]),
    scored("a negative label", label_token_ids=[-1]),
    scored("no items", items=[]),
    scored("items missing", items=...),
    scored("an empty item", items=["", " and 1"]),
    scored("an empty query", query=""),
    scored("nothing", query=[], items=[[]]),
    scored("query missing", query=...),
    scored("an unknown token", items=[[100_000]]),
    scored("beyond the context", items=["Add 1 and 2. " * 2000]),
    scored("beyond the context, item first", items=["Add 1 and 2. " * 2000], item_first=True),
    scored("cache_salt", cache_salt="salt"),
    scored("cache_salt with a slash", cache_salt="a/b"),
    scored("priority", priority=0),
    scored("model left out", model=...),
    scored("model unknown", model="nobody"),
    scored("unknown parameter", mood="good"),
    scored("temperature", temperature=0.5, max_tokens=7),
]
