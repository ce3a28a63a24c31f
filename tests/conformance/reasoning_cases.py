"""A model that reasons, at every path that it answers at."""

from typing import Any

from tests.conformance.case import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Case

COUNT = "Count from 2 up to 12."
ASKED = [{"role": "user", "content": COUNT}]
USAGE = {"include_usage": True}
ON, OFF = {"chat_template_kwargs": {"enable_thinking": True}}, {"chat_template_kwargs": {"enable_thinking": False}}
COUNTED = {
    "type": "json_schema",
    "json_schema": {"name": "counted", "schema": {"type": "array", "items": {"type": "integer", "maximum": 9}}},
}


def _asked(subject: str, name: str, path: str, defaults: dict[str, Any], fields: dict[str, Any]) -> Case:
    body = {"model": "thinks"} | defaults | fields
    return Case(f"{subject}: reasoning, {name}", path, body, served="thinks")


def chat(name: str, **fields: Any) -> Case:
    return _asked("chat", name, CHAT, {"messages": ASKED, "max_tokens": 16, "temperature": 0}, fields)


def both(name: str, **fields: Any) -> list[Case]:
    """Whole and as a stream."""
    return [chat(name, **fields), chat(f"{name}, streamed", stream=True, stream_options=USAGE, **fields)]


def completion(name: str, **fields: Any) -> Case:
    defaults = {"prompt": f"<s><|user|>{COUNT}</s><|assistant|><think>", "max_tokens": 16, "temperature": 0}
    return _asked("completions", name, COMPLETIONS, defaults, fields)


def response(name: str, **fields: Any) -> Case:
    defaults = {"input": COUNT, "max_output_tokens": 16, "temperature": 0}
    return _asked("responses", name, RESPONSES, defaults, fields)


def message(name: str, **fields: Any) -> Case:
    return _asked("messages", name, MESSAGES, {"messages": ASKED, "max_tokens": 16, "temperature": 0}, fields)


CASES = [
    *both("plain"),
    *both("to its end", max_tokens=40),
    *both("cut within", max_tokens=4),
    *both("include_reasoning false", include_reasoning=False),
    *both("begun by the template", **ON),
    *both("closed by the template", **OFF),
    *both("reasoning_effort none", reasoning_effort="none"),
    *both("reasoning_effort low", reasoning_effort="low"),
    *both("budget", thinking_token_budget=5, **ON),
    *both("budget of nothing", thinking_token_budget=0, **ON),
    *both("budget beyond the answer", thinking_token_budget=500, **ON),
    chat("budget -1", thinking_token_budget=-1, **ON),
    chat("budget -2", thinking_token_budget=-2, **ON),
    chat("budget null", thinking_token_budget=None, **ON),
    chat("budget true", thinking_token_budget=True, **ON),
    chat("budget of another kind", thinking_token_budget={"tokens": 5}, **ON),
    chat("budget and include_reasoning false", thinking_token_budget=5, include_reasoning=False, **ON),
    chat("several answers", n=2, temperature=1.0, seed=3, max_tokens=4, **ON),
    chat("usage in every chunk", stream=True, stream_options=USAGE | {"continuous_usage_stats": True}),
    chat("logprobs", logprobs=True, top_logprobs=1),
    chat("token ids", return_token_ids=True),
    *both("response_format", response_format=COUNTED, max_tokens=40),
    chat("an earlier thought", messages=[*ASKED, {"role": "assistant", "content": "2", "reasoning": "hm"}, *ASKED]),
    completion("plain"),
    completion("budget", thinking_token_budget=5),
    completion("budget -2", thinking_token_budget=-2),
    response("plain"),
    response("streamed", stream=True),
    response("to its end", max_output_tokens=40),
    response("effort none", reasoning={"effort": "none"}),
    # With most other prompts the one token that vLLM puts before it makes another answer.
    response("effort low", reasoning={"effort": "low"}, input="Count from 3 up to 9."),
    response("include_reasoning false", include_reasoning=False),
    message(
        "an earlier thought",
        messages=[*ASKED, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}, *ASKED],
    ),
    message("a system amid", messages=[*ASKED, {"role": "system", "content": "Be brief."}, *ASKED]),
    message("plain"),
    message("streamed", stream=True),
    message("thinking enabled", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1030),
    message("thinking without a budget", thinking={"type": "enabled"}),
    message("thinking with a small budget", thinking={"type": "enabled", "budget_tokens": 5}),
    message("thinking adaptive", thinking={"type": "adaptive"}),
    message("thinking disabled", thinking={"type": "disabled"}),
    message("thinking of another kind", thinking={"type": "deep"}),
]
