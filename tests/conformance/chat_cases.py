"""Chat completions: every parameter, and what is refused."""

from typing import Any

from tests.conformance.case import CHAT, Case

ADD = [{"role": "user", "content": "Add 4991 and 6299."}]
COUNT = [{"role": "user", "content": "Count from 7 up to 30."}]
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SUM}}
OTHER_TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "add"}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}<|assistant|>"


def chat(name: str, **fields: Any) -> Case:
    """A greedy chat of a few tokens, unless the fields say otherwise; a field that is `...` is left out."""
    body = {"model": "demo-large", "messages": ADD, "max_tokens": 12, "temperature": 0} | fields
    return Case(f"chat: {name}", CHAT, {key: value for key, value in body.items() if value is not ...})


def streamed(name: str, **fields: Any) -> Case:
    return chat(f"{name}, streamed", **{**STREAMED, **fields})


def both(name: str, **fields: Any) -> list[Case]:
    """Whole and as a stream."""
    return [chat(name, **fields), streamed(name, **fields)]


def said(*contents: Any) -> list[dict[str, Any]]:
    """A conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[index % 2], "content": each} for index, each in enumerate(contents)]


CALLED = [
    *ADD,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"sum": 7}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "11290"},
]


def called(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    """A conversation in which a function was called so; a field that is `...` is left out."""
    function = {"name": "add", "arguments": arguments, **fields}
    function = {name: value for name, value in function.items() if value is not ...}
    asked, turn, answer = CALLED
    return [asked, {**turn, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}, answer]


BRIEF: dict[str, Any] = {"role": "developer", "content": "Be brief."}
SYSTEM = {"role": "system", "content": "You add."}
CASES = [
    *both("plain"),
    *both("no limit", max_tokens=..., messages=said("Add 1 and 2.")),
    chat("model left out", model=...),
    chat("model null", model=None),
    chat("model unknown", model="nobody"),
    chat("messages empty", messages=[]),
    chat("messages missing", messages=...),
    chat("messages no list", messages="Add 1 and 2."),
    chat("message without role", messages=[{"content": "Add 1 and 2."}]),
    chat("message of an unknown role", messages=[{"role": "wizard", "content": "Add 1 and 2."}]),
    chat("message without content", messages=[{"role": "user"}]),
    chat("content null", messages=[{"role": "user", "content": None}]),
    chat("content empty", messages=said("")),
    chat("content of parts", messages=said([{"type": "text", "text": "Add 4991"}, {"type": "text", "text": "and 2."}])),
    chat("content of an unknown part", messages=said([{"type": "telepathy", "telepathy": "Add 1 and 2."}])),
    chat("content of a part with more", messages=said([{"type": "text", "text": "Add 1 and 2.", "mood": "good"}])),
    chat("content of no image model", messages=said([{"type": "image_url", "image_url": {"url": "data:,x"}}])),
    chat("a developer's message", messages=[{"role": "developer", "content": "Be brief."}, *ADD]),
    *(
        chat(f"developers' messages, {name}", messages=messages)
        for name, messages in (
            ("amid the turns", [*ADD, BRIEF, *ADD]),
            ("and a system's", [SYSTEM, *ADD, BRIEF, *ADD]),
            ("twice", [BRIEF, BRIEF, *ADD]),
            ("before a system's", [BRIEF, SYSTEM, *ADD]),
            ("empty", [{**BRIEF, "content": ""}, SYSTEM, *ADD]),
            (
                "of parts",
                [*ADD, {**BRIEF, "content": [{"type": "text", "text": each} for each in ("Be", "brief.")]}, *ADD],
            ),
        )
    ),
    chat("chat_template_kwargs tools", chat_template_kwargs={"tools": [TOOL]}),
    chat("chat_template_kwargs add_generation_prompt", chat_template_kwargs={"add_generation_prompt": False}),
    chat("chat_template_kwargs chat_template", chat_template_kwargs={"chat_template": "{{ messages[0].content }}"}),
    chat(
        "kv_transfer_params of a prompt", kv_transfer_params={"prompt_token_ids": [45, 293, 84]}, return_token_ids=True
    ),
    chat("kv_transfer_params of no prompt", kv_transfer_params={"prompt_token_ids": []}),
    chat("kv_transfer_params beyond the vocabulary", kv_transfer_params={"prompt_token_ids": [100_000]}),
    chat("media_io_kwargs empty", media_io_kwargs={}),
    chat("a tool of a name in words", tools=[{"type": "function", "function": {"name": "a b"}}]),
    chat("a system's message", messages=[{"role": "system", "content": "Be brief."}, *ADD]),
    chat("three turns", messages=said("Add 1 and 2.", "3", "Add 3 and 4.")),
    chat("names of speakers", messages=[{"role": "user", "name": "ann", "content": "Add 1 and 2."}]),
    chat(
        "reasoning of an earlier turn", messages=[*ADD, {"role": "assistant", "content": "1", "reasoning": "x"}, *ADD]
    ),
    chat("reasoning_content", messages=[*ADD, {"role": "assistant", "content": "1", "reasoning_content": "x"}, *ADD]),
    chat("unknown field of a message", messages=[{"role": "user", "content": "Add 1 and 2.", "mood": "good"}]),
    chat("unknown parameter", mood="good"),
    *both("max_completion_tokens", max_tokens=..., max_completion_tokens=3),
    chat("max_completion_tokens goes before", max_tokens=9, max_completion_tokens=3),
    chat("max_tokens 0", max_tokens=0),
    chat("max_tokens 1", max_tokens=1),
    chat("max_tokens negative", max_tokens=-1),
    chat("max_tokens a text", max_tokens="seven"),
    chat("max_tokens a text of digits", max_tokens="7"),
    chat("max_tokens null", max_tokens=None, messages=said("Add 1 and 2.")),
    chat("max_tokens beyond the context", max_tokens=100_000),
    chat("prompt beyond the context", messages=said("Add 1 and 2. " * 2000)),
    chat("min_tokens", min_tokens=10, messages=said("Add 1 and 2.")),
    chat("min_tokens above max_tokens", min_tokens=20),
    chat("min_tokens negative", min_tokens=-1),
    *both("n", n=2, seed=1),
    chat("n 0", n=0),
    chat("n null", n=None),
    chat("n of greedy", n=3),
    chat("seed", seed=7, temperature=...),
    chat("seed negative", seed=-7),
    chat("seed too large", seed=2**64),
    chat("temperature negative", temperature=-0.1),
    chat("temperature 3", temperature=3, seed=1, max_tokens=1, allowed_token_ids=[300]),
    chat("temperature a text", temperature="warm"),
    chat("top_p", top_p=0.5),
    chat("top_p 0", top_p=0),
    chat("top_p 1.5", top_p=1.5),
    chat("top_k", top_k=1, temperature=1),
    chat("top_k -1", top_k=-1),
    chat("top_k -2", top_k=-2),
    chat("min_p", min_p=0.2),
    chat("min_p 2", min_p=2),
    chat("presence_penalty", presence_penalty=1.5),
    chat("presence_penalty 3", presence_penalty=3),
    chat("frequency_penalty", frequency_penalty=-1.5),
    chat("frequency_penalty -3", frequency_penalty=-3),
    chat("repetition_penalty", repetition_penalty=1.3),
    chat("repetition_penalty 0", repetition_penalty=0),
    *both("stop", stop=["9"]),
    *both("stop, one string", stop="9"),
    *both("stop string shown", stop=["9"], include_stop_str_in_output=True),
    chat("stop null", stop=None),
    chat("stop empty", stop=[]),
    chat("stop of an empty string", stop=[""]),
    *both("stop_token_ids", stop_token_ids=[300, 301, 302]),
    chat("stop_token_ids null", stop_token_ids=None),
    chat("ignore_eos", ignore_eos=True, messages=said("Add 1 and 2.")),
    chat("special tokens shown", skip_special_tokens=False, messages=said("Add 1 and 2.")),
    chat("spaces_between_special_tokens", spaces_between_special_tokens=False, skip_special_tokens=False),
    chat("logit_bias", logit_bias={"300": 100}),
    chat("logit_bias of a word", logit_bias={"seven": 1}),
    chat("logit_bias of an unknown token", logit_bias={"100000": 1}),
    chat("logit_bias out of range", logit_bias={"300": 200}),
    chat("allowed_token_ids", allowed_token_ids=[300, 301]),
    chat("allowed_token_ids empty", allowed_token_ids=[]),
    chat("allowed_token_ids unknown", allowed_token_ids=[100_000]),
    chat("bad_words", bad_words=["9", "1"]),
    chat("bad_words empty", bad_words=[]),
    *both("logprobs", logprobs=True),
    *both("top_logprobs", logprobs=True, top_logprobs=2),
    chat("top_logprobs 0", logprobs=True, top_logprobs=0),
    chat("top_logprobs -1", logprobs=True, top_logprobs=-1, max_tokens=1),
    chat("top_logprobs without logprobs", top_logprobs=2),
    chat("top_logprobs 21", logprobs=True, top_logprobs=21),
    chat("top_logprobs -2", logprobs=True, top_logprobs=-2),
    chat("logprobs to the end", logprobs=True, max_tokens=40, messages=said("Add 1 and 2.")),
    chat("tokens as ids", logprobs=True, return_tokens_as_token_ids=True),
    chat("prompt_logprobs", prompt_logprobs=1),
    chat("prompt_logprobs 0", prompt_logprobs=0),
    chat("prompt_logprobs -1", prompt_logprobs=-1, max_tokens=1),
    chat("prompt_logprobs -2", prompt_logprobs=-2),
    streamed("prompt_logprobs", prompt_logprobs=1),
    *both("logprob_token_ids", logprobs=True, logprob_token_ids=[300, 301]),
    chat("logprob_token_ids, top_logprobs", logprobs=True, top_logprobs=1, logprob_token_ids=[300, 301, 302]),
    chat("logprob_token_ids twice", logprobs=True, logprob_token_ids=[300, 301, 300]),
    chat("logprob_token_ids by id", logprobs=True, logprob_token_ids=[300], return_tokens_as_token_ids=True),
    chat("logprob_token_ids, none", logprobs=True, logprob_token_ids=[]),
    chat("logprob_token_ids, 128", logprobs=True, logprob_token_ids=list(range(20, 148)), max_tokens=2),
    chat("logprob_token_ids, 129", logprobs=True, logprob_token_ids=list(range(20, 149)), max_tokens=2),
    chat("logprob_token_ids of another model", logprobs=True, logprob_token_ids=[10**6]),
    chat("logprob_token_ids, n", logprobs=True, logprob_token_ids=[300], n=2, temperature=1.0, seed=1, max_tokens=2),
    chat("logprob_token_ids without logprobs", logprob_token_ids=[300, 301]),
    *both("token ids", return_token_ids=True),
    *both("token ids to the end", return_token_ids=True, max_tokens=40, messages=said("Add 1 and 2.")),
    *both("prompt text", return_prompt_text=True),
    *both("echo", echo=True, messages=said("Add 1 and 2.", "3"), add_generation_prompt=False),
    chat(
        "continue_final_message",
        messages=said("Add 1 and 2.", "The"),
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    chat(
        "continued and begun",
        messages=said("Add 1 and 2.", "The"),
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    chat("add_generation_prompt", add_generation_prompt=False),
    chat("add_special_tokens", add_special_tokens=True, return_token_ids=True, max_tokens=1),
    chat("truncate_prompt_tokens", truncate_prompt_tokens=6, return_token_ids=True, max_tokens=1),
    chat("truncate_prompt_tokens -1", truncate_prompt_tokens=-1, messages=said("Add 1 and 2. " * 2000), max_tokens=1),
    chat("truncate_prompt_tokens -2", truncate_prompt_tokens=-2),
    chat("truncation_side", truncate_prompt_tokens=6, truncation_side="right", return_token_ids=True, max_tokens=1),
    chat("chat_template", chat_template=TEMPLATE),
    chat("chat_template_kwargs", chat_template_kwargs={"enable_thinking": False}),
    chat("documents", documents=[{"title": "Sums", "text": "1 and 2 are 3."}]),
    chat("reasoning_effort", reasoning_effort="low"),
    chat("reasoning_effort none", reasoning_effort="none"),
    chat("reasoning_effort unknown", reasoning_effort="heroic"),
    chat("verbosity", verbosity="low"),
    chat("thinking_token_budget", thinking_token_budget=10),
    chat("include_reasoning", include_reasoning=False),
    chat("watermarking", watermarking=False),
    chat("repetition_detection", repetition_detection={"max_pattern_size": 4, "min_count": 3}, max_tokens=30),
    *both("stream_interval", stream_interval=4),
    chat("stream_interval 0", stream_interval=0),
    chat("kv_transfer_params", kv_transfer_params={}),
    chat("vllm_xargs", vllm_xargs={"a": 1, "b": "two", "c": [1, 2]}),
    chat("media_io_kwargs", media_io_kwargs={"video": {"num_frames": 4}}),
    chat("mm_processor_kwargs", mm_processor_kwargs={"size": 4}),
    chat("cache_salt", cache_salt="c2FsdA"),
    chat("cache_salt with a slash", cache_salt="a/b"),
    chat("cache_salt empty", cache_salt=""),
    chat("cache_salt overlong", cache_salt="x" * 2000),
    chat("priority 0", priority=0),
    chat("request_id", request_id="mine"),
    chat("session_id", session_id="mine"),
    chat("user", user="ann"),
    chat("metadata", metadata={"a": "b"}),
    chat("store", store=True),
    chat("service_tier", service_tier="auto"),
    chat("parallel_tool_calls alone", parallel_tool_calls=False),
    streamed("usage in every chunk", stream_options={"include_usage": True, "continuous_usage_stats": True}),
    streamed(
        "usage in every chunk, logprobs",
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        logprobs=True,
    ),
    streamed("usage of chunks alone", stream_options={"include_usage": False, "continuous_usage_stats": True}),
    streamed("no usage", stream_options={"include_usage": False}),
    streamed("stream_options null", stream_options=None),
    streamed("stream_options empty", stream_options={}),
    streamed("stream_options with more", stream_options={"include_usage": True, "mood": "good"}),
    chat("stream_options of no stream", stream_options={"include_usage": True}),
    chat("stream null", stream=None),
    *both("response_format text", response_format={"type": "text"}),
    *both("response_format json_object", response_format={"type": "json_object"}),
    *both(
        "response_format json_schema",
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}},
    ),
    chat("json_schema without a schema", response_format={"type": "json_schema"}),
    chat("json_schema without a name", response_format={"type": "json_schema", "json_schema": {"schema": SUM}}),
    chat(
        "json_schema strict",
        response_format={"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SUM}},
    ),
    chat(
        "json_schema that is wrong",
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "wrong"}}},
    ),
    chat("response_format unknown", response_format={"type": "poem"}),
    chat("structured_outputs choice", structured_outputs={"choice": ["yes", "no"]}),
    chat("structured_outputs regex", structured_outputs={"regex": "[0-9]{3}"}),
    chat("structured_outputs json", structured_outputs={"json": SUM}),
    chat("structured_outputs json_object", structured_outputs={"json_object": True}),
    chat("structured_outputs grammar", structured_outputs={"grammar": 'root ::= "yes" | "no"'}),
    chat("structured_outputs empty", structured_outputs={}),
    chat("structured_outputs of two kinds", structured_outputs={"choice": ["yes"], "regex": "a"}),
    chat("structured_outputs wrong regex", structured_outputs={"regex": "["}),
    chat("structured_outputs empty choice", structured_outputs={"choice": []}),
    *both("tools auto", tools=[TOOL], tool_choice="auto"),
    *both("tools, no choice", tools=[TOOL]),
    *both("tools none", tools=[TOOL], tool_choice="none"),
    *both("tools required", tools=[TOOL], tool_choice="required", max_tokens=60),
    *both("tools named", tools=[TOOL, OTHER_TOOL], tool_choice=NAMED, max_tokens=60),
    *both("tools named, cut short", tools=[TOOL], tool_choice=NAMED, max_tokens=2),
    *both("tools required, cut short", tools=[TOOL], tool_choice="required", max_tokens=4),
    chat("tools required, one call", tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=60),
    chat(
        "tools strict",
        tools=[{**TOOL, "function": {**TOOL["function"], "strict": True}}],
        tool_choice="required",
        max_tokens=60,
    ),  # type: ignore[dict-item]
    chat("tools without parameters", tools=[{"type": "function", "function": {"name": "add"}}], max_tokens=4),
    chat("tools empty", tools=[]),
    chat("tools null", tools=None, tool_choice=None),
    chat("tool_choice without tools", tool_choice="required"),
    chat("tool_choice auto without tools", tool_choice="auto"),
    chat("tool_choice none without tools", tool_choice="none"),
    chat("tool_choice of another name", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
    chat("tool_choice unknown", tools=[TOOL], tool_choice="perhaps"),
    chat(
        "tools and response_format",
        tools=[TOOL],
        tool_choice="required",
        response_format={"type": "json_object"},
        max_tokens=60,
    ),
    chat("an earlier call", messages=CALLED),
    *(
        chat(f"an earlier call, {name}", messages=called(arguments))
        for name, arguments in (
            ("cut short", '{"sum": 7'),
            ("of no object", "[7]"),
            ("of a number", "7"),
            ("of null", "null"),
            ("of an object", {"sum": 7}),
            ("of a list", [7]),
            ("empty", ""),
            ("without arguments", ...),
            ("with null", None),
        )
    ),
    chat("an earlier call without a name", messages=called("{}", name=...)),
    chat("an earlier call with a field of no meaning", messages=called("{}", mood="good")),
    chat("tools that wait", tools=[{"type": "function", "function": TOOL["function"], "defer_loading": True}]),
    chat("an earlier call, tools", messages=CALLED, tools=[TOOL]),
    chat("functions", functions=[TOOL["function"]]),
    chat("modalities", modalities=["text"]),
    *both("beam search", use_beam_search=True, n=2, max_tokens=6),
    chat("beam search, length_penalty", use_beam_search=True, n=2, max_tokens=6, length_penalty=0.5),
    chat("beam search, logprob_token_ids", use_beam_search=True, logprobs=True, logprob_token_ids=[300]),
    chat("length_penalty alone", length_penalty=0.5),
    chat("routed_experts_prompt_start", routed_experts_prompt_start=0),
    Case("chat: no JSON", CHAT, raw=b"{"),
    Case("chat: no object", CHAT, raw=b"[1]"),
    Case("chat: empty body", CHAT, raw=b""),
    Case(
        "chat: a text's content type",
        CHAT,
        {"model": "demo-large", "messages": ADD, "max_tokens": 2, "temperature": 0},
        headers={"content-type": "text/plain"},
    ),
    Case("chat: GET", CHAT, method="GET"),
]
