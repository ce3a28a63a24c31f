"""Responses, the tokenizer's paths, models and what else a server says of itself, and pooling."""

from dataclasses import replace
from typing import Any

from tests.conformance.case import METRICS, RESPONSES, Case
from tests.conformance.chat_cases import ADD, OTHER_TOOL, SUM, TOOL
from tests.conformance.completion_cases import PROMPT

FLAT_TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SUM}
ASKED = "Add 4991 and 6299."


def response(name: str, **fields: Any) -> Case:
    """A greedy response of a few tokens; a field that is `...` is left out."""
    body = {"model": "unmarked", "input": ASKED, "max_output_tokens": 12, "temperature": 0} | fields
    given = {key: value for key, value in body.items() if value is not ...}
    return Case(f"responses: {name}", RESPONSES, given, served="unmarked")


def of_model(subject: str, name: str, path: str, model: str = "demo-large", **fields: Any) -> Case:
    body = {"model": model} | fields
    return Case(f"{subject}: {name}", path, {key: value for key, value in body.items() if value is not ...})


def get(subject: str, path: str, **others: Any) -> Case:
    return Case(f"{subject}: GET {path}", path, method="GET", **others)


TEXT_PARTS = [{"role": "user", "content": [{"type": "input_text", "text": ASKED}]}]
PRIOR = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "3"}, *ADD]
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"sum": 3}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
ITEMS = [{"role": "user", "content": "Add 1 and 2."}, CALL, OUTPUT, *ADD]
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add them."}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": 'a "b"\n'}
CUSTOM_OUTPUT = {
    "type": "custom_tool_call_output",
    "call_id": "call_2",
    "output": [{"type": "input_text", "text": "ok"}],
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
CUSTOM_TOOL = {"type": "custom", "name": "patch", "description": "Takes a patch."}
NAMESPACE = {
    "type": "namespace",
    "name": "sums",
    "description": "Sums.",
    "tools": [{"type": "function", "name": "add", "parameters": SUM, "strict": None}],
}


def events_of(which: str, behind: str) -> Case:
    """Of a response that was streamed, read again."""
    streamed = response("background, streamed", background=True, stream=True)
    path = f"/v1/responses/{{id}}?stream=true{behind}"
    return Case(f"responses: background, events {which}", path, method="GET", after=streamed, served="unmarked")


RESPONSES_CASES = [
    response("plain"),
    response("plain, streamed", stream=True),
    response("no limit", max_output_tokens=..., input="Add 1 and 2."),
    response("to the end", max_output_tokens=60, input="Add 1 and 2."),
    response("to the end, streamed", max_output_tokens=60, input="Add 1 and 2.", stream=True),
    response("model left out", model=...),
    response("model unknown", model="nobody"),
    response("input missing", input=...),
    response("input empty", input=""),
    response("input of parts", input=TEXT_PARTS),
    response("input of turns", input=PRIOR),
    response("input of calls", input=ITEMS),
    response(
        "input of parts, two",
        input=[{"role": "user", "content": [*TEXT_PARTS[0]["content"], *TEXT_PARTS[0]["content"]]}],
    ),
    response("input of a turn that says and calls", input=[*ADD, THOUGHT, SAID, CALL, OUTPUT]),
    response("input of a turn that calls twice", input=[*ADD, CALL, {**CALL, "call_id": "call_3"}, OUTPUT]),
    response("input of what was thought", input=[*ADD, THOUGHT, SAID, *ADD]),
    response("input of what was thought, encrypted", input=[*ADD, {**THOUGHT, "encrypted_content": "x"}]),
    response("input of a call in a namespace", input=[*ADD, {**CALL, "namespace": "sums"}, OUTPUT]),
    response("input of a custom call", input=[*ADD, CUSTOM_CALL, CUSTOM_OUTPUT], tools=[CUSTOM_TOOL]),
    response("input of an answer to go on with", input=[*ADD, {**SAID, "status": "in_progress"}]),
    response("input of an answer cut short", input=[*ADD, {**SAID, "status": "incomplete"}]),
    response("input of an answer that is complete", input=[*ADD, {**SAID, "status": "completed"}]),
    response("input of developers", input=[*ADD, {"role": "developer", "content": "Be brief."}, *ADD]),
    response("prompt", prompt={"id": "x"}),
    response("metadata of numbers", metadata={"a": 1}),
    response("input of an unknown kind", input=[{"type": "telepathy"}]),
    response("instructions", instructions="Be brief."),
    response("seed", seed=7),
    response("stop", stop=["9"]),
    response("top_k", top_k=1),
    response("min_p", min_p=0.1),
    response("top_p", top_p=0.5),
    response("temperature left out", temperature=..., top_k=1),
    response("presence_penalty", presence_penalty=1.0),
    response("frequency_penalty", frequency_penalty=1.0),
    response("frequency_penalty 3", frequency_penalty=3.0),
    response("repetition_penalty", repetition_penalty=1.3),
    response("logit_bias", logit_bias={"300": 100}),
    response("ignore_eos", ignore_eos=True),
    response("skip_special_tokens", skip_special_tokens=False),
    response("include_stop_str_in_output", include_stop_str_in_output=True, stop=["9"]),
    response("top_logprobs", top_logprobs=2, include=["message.output_text.logprobs"]),
    response("top_logprobs, streamed", top_logprobs=2, include=["message.output_text.logprobs"], stream=True),
    response("top_logprobs alone", top_logprobs=2),
    response("logprobs of the sampled token", include=["message.output_text.logprobs"]),
    response("include encrypted reasoning", include=["reasoning.encrypted_content"]),
    response("include unknown", include=["telepathy"]),
    response("structured_outputs", structured_outputs={"choice": ["yes", "no"]}),
    response("text of a schema", text={"format": {"type": "json_schema", "name": "sum", "schema": SUM}}),
    response(
        "text of a schema, streamed", text={"format": {"type": "json_schema", "name": "s", "schema": SUM}}, stream=True
    ),
    response("text of an object", text={"format": {"type": "json_object"}}),
    response("text plain", text={"format": {"type": "text"}}),
    response("text verbosity", text={"verbosity": "low"}),
    response("chat_template_kwargs", chat_template_kwargs={"enable_thinking": False}),
    response("vllm_xargs", vllm_xargs={"a": 1}),
    response("kv_transfer_params", kv_transfer_params={}),
    response("cache_salt", cache_salt="c2FsdA"),
    response("cache_salt with a slash", cache_salt="a/b"),
    response("priority 0", priority=0),
    response("request_id", request_id="resp_mine"),
    response("session_id", session_id="mine"),
    response("user", user="ann"),
    response("metadata", metadata={"a": "b"}),
    response("prompt_cache_key", prompt_cache_key="mine"),
    response("service_tier", service_tier="default"),
    response("service_tier unknown", service_tier="first class"),
    response("truncation auto", truncation="auto"),
    response("truncation disabled", truncation="disabled"),
    response("max_tool_calls", max_tool_calls=2),
    response("parallel_tool_calls", parallel_tool_calls=False),
    response("reasoning effort", reasoning={"effort": "low"}),
    response("reasoning summary", reasoning={"summary": "auto"}),
    response("include_reasoning", include_reasoning=False),
    response("tool_choice auto without tools", tool_choice="auto"),
    response("tool_choice required without tools", tool_choice="required"),
    response("tools", tools=[FLAT_TOOL]),
    response("tools required", tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=60),
    response("tools required, streamed", tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=60, stream=True),
    response("tools named", tools=[FLAT_TOOL], tool_choice={"type": "function", "name": "add"}, max_output_tokens=60),
    response("tools of a namespace", tools=[NAMESPACE]),
    response("tools of a namespace, named", tools=[NAMESPACE], tool_choice={"type": "function", "name": "sums__add"}),
    response("tools of a namespace, named alone", tools=[NAMESPACE], tool_choice={"type": "function", "name": "add"}),
    response("tools custom", tools=[CUSTOM_TOOL]),
    response("tools custom, named", tools=[CUSTOM_TOOL], tool_choice={"type": "custom", "name": "patch"}),
    response("tools custom, required, streamed", tools=[CUSTOM_TOOL], tool_choice="required", stream=True),
    response("tools custom, of a grammar", tools=[{**CUSTOM_TOOL, "format": GRAMMAR}]),
    response("tools named that are not there", tools=[FLAT_TOOL], tool_choice={"type": "function", "name": "sub"}),
    response("tools of the server's named", tools=[FLAT_TOOL], tool_choice={"type": "file_search"}),
    response(
        "tools allowed",
        tools=[FLAT_TOOL],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    ),
    response("tools none", tools=[FLAT_TOOL], tool_choice="none"),
    response("tools empty", tools=[]),
    *(
        response(f"a tool of the server's, {tool['type']}", tools=[tool])
        for tool in (
            {"type": "web_search"},
            {"type": "web_search_preview"},
            {"type": "file_search", "vector_store_ids": ["x"]},
            {"type": "code_interpreter", "container": {"type": "auto"}},
            {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1/mcp"},
        )
    ),
    response("enable_response_messages", enable_response_messages=True),
    response("store false", store=False),
    response("background", background=True),
    response("background, streamed", background=True, stream=True),
    response("background, of an unknown model", background=True, model="nobody"),
    response("background, too long", background=True, input="a " * 5000),
    replace(response("of a tokenizer that marks", model="demo-large"), served="demo-large"),
    Case(
        "responses: background, at its end",
        "/v1/responses/{id}",
        method="GET",
        after=response("background", background=True),
        until_ended=True,
        served="unmarked",
    ),
    Case(
        "responses: background, cancelled",
        "/v1/responses/{id}/cancel",
        after=response("background", background=True, max_output_tokens=2000, ignore_eos=True),
        served="unmarked",
    ),
    events_of("again", ""),
    events_of("behind the third", "&starting_after=2"),
    response("background without store", background=True, store=False),
    response("previous unknown", previous_response_id="resp_nobody"),
    response("previous wrong", previous_response_id="nobody"),
    response("unknown parameter", mood="good"),
    response("max_output_tokens 0", max_output_tokens=0),
    response("max_output_tokens negative", max_output_tokens=-1),
    response("temperature 3", temperature=3),
    get("responses", "/v1/responses/resp_nobody", served="unmarked"),
    get("responses", "/v1/responses/{id}", after=response("kept"), served="unmarked"),
    Case("responses: cancel of an unknown one", "/v1/responses/resp_nobody/cancel", served="unmarked"),
    Case("responses: cancel of an ended one", "/v1/responses/{id}/cancel", after=response("kept"), served="unmarked"),
]

TOKENIZER_CASES = [
    of_model("tokenizer", "text", "/tokenize", prompt=PROMPT),
    of_model("tokenizer", "text without special tokens", "/tokenize", prompt=PROMPT, add_special_tokens=False),
    of_model("tokenizer", "text, token strings", "/tokenize", prompt=PROMPT, return_token_strs=True),
    of_model("tokenizer", "text empty", "/tokenize", prompt=""),
    of_model("tokenizer", "text missing", "/tokenize"),
    of_model("tokenizer", "unknown model", "/tokenize", model="nobody", prompt="x"),
    of_model("tokenizer", "chat", "/tokenize", messages=ADD),
    of_model("tokenizer", "chat, token strings", "/tokenize", messages=ADD, return_token_strs=True),
    of_model("tokenizer", "chat with tools", "/tokenize", messages=ADD, tools=[TOOL, OTHER_TOOL]),
    of_model("tokenizer", "chat with an empty list of tools", "/tokenize", messages=ADD, tools=[]),
    of_model("tokenizer", "chat without a generation prompt", "/tokenize", messages=ADD, add_generation_prompt=False),
    of_model(
        "tokenizer",
        "chat continued and begun",
        "/tokenize",
        messages=ADD,
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    of_model("tokenizer", "chat_template", "/tokenize", messages=ADD, chat_template="{{ messages[0]['content'] }}"),
    of_model("tokenizer", "detokenize", "/detokenize", tokens=[1, 20, 300, 2]),
    of_model("tokenizer", "detokenize nothing", "/detokenize", tokens=[]),
    of_model("tokenizer", "detokenize an unknown token", "/detokenize", tokens=[100_000]),
    of_model("tokenizer", "detokenize a negative token", "/detokenize", tokens=[-1]),
    get("tokenizer", "/tokenizer_info"),
]

BATCHES: dict[str, dict[str, Any]] = {
    "": {},
    ", one": {"messages": [ADD]},
    ", one that is no list": {"messages": ADD},
    ", none": {"messages": []},
    ", an empty one": {"messages": [ADD, []]},
    ", logprobs": {"logprobs": True, "top_logprobs": 2},
    ", token ids": {"return_token_ids": True},
    ", n 2": {"n": 2},
    ", beam search": {"use_beam_search": True},
    ", tools": {"tools": [TOOL]},
    ", tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    ", echo": {"echo": True, "messages": [[*ADD, {"role": "assistant", "content": "It is "}], ADD]},
    ", response_format": {"response_format": {"type": "json_object"}},
    ", unknown parameter": {"mood": "good"},
    ", unknown model": {"model": "nobody"},
}

SERVER_CASES = [
    get("server", "/v1/models"),
    get("server", "/v1/models/demo-large"),
    get("server", "/v1/models/"),
    get("server", "/health"),
    get("server", "/ping"),
    get("server", "/version"),
    get("server", "/load"),
    get("server", "/nowhere"),
    Case("server: POST /ping", "/ping"),
    Case(
        "server: invocations, chat",
        "/invocations",
        {"model": "demo-large", "messages": ADD, "max_tokens": 4, "temperature": 0},
    ),
    Case("server: invocations, neither", "/invocations", {"model": "demo-large", "max_tokens": 4}),
    Case(
        "server: invocations, streamed",
        "/invocations",
        {"model": "demo-large", "messages": ADD, "max_tokens": 4, "temperature": 0, "stream": True},
    ),
    Case(
        "server: invocations, completion",
        "/invocations",
        {"model": "demo-large", "prompt": PROMPT, "max_tokens": 4, "temperature": 0},
    ),
    *(
        Case(
            f"server: batch of chats{name}",
            "/v1/chat/completions/batch",
            {"model": "demo-large", "messages": [ADD, PRIOR], "max_tokens": 4, "temperature": 0, **fields},
        )
        for name, fields in BATCHES.items()
    ),
    of_model("server", "render a chat", "/v1/chat/completions/render", messages=ADD),
    of_model("server", "render a completion", "/v1/completions/render", prompt=PROMPT),
    of_model("server", "embeddings of a model that generates", "/v1/embeddings", input="x"),
    of_model("server", "score of a model that generates", "/score", text_1="x", text_2="y"),
    Case(
        "server: ORCA's header",
        "/v1/completions",
        {"model": "demo-large", "prompt": PROMPT, "max_tokens": 2, "temperature": 0},
        headers={"endpoint-load-metrics-format": "text"},
    ),
    Case(
        "server: ORCA's header, JSON",
        "/v1/chat/completions",
        {"model": "demo-large", "messages": ADD, "max_tokens": 2, "temperature": 0},
        headers={"endpoint-load-metrics-format": "JSON"},
    ),
    Case(
        "server: ORCA's header, unknown",
        "/v1/completions",
        {"model": "demo-large", "prompt": PROMPT, "max_tokens": 2, "temperature": 0},
        headers={"endpoint-load-metrics-format": "bin"},
    ),
    get("server", METRICS),
]
