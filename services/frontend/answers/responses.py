"""Answers in the form of OpenAI's Responses API, made of those of a chat completion (pure)."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from services.frontend.answers.sse import encode
from services.frontend.requests.responses_tools import CalledTool, CustomTextReader, called_tools, custom_text

_UNFINISHED: Final = "in_progress"
_CALLS: Final = ("function_call", "custom_tool_call")

Keep = Callable[[bytes, dict[str, Any]], None]
"""Is given the whole response and the assistant's turn in it."""


class ResponsesTranslator:
    """A `Translator` of one answer."""

    def __init__(
        self,
        response_id: str,
        facts: dict[str, Any],
        keep: Keep,
        max_tokens: Callable[[], int | None],
        model: str = "",
    ) -> None:
        """`facts`: what the response says of its request, such as `instructions`. `max_tokens`: of the longest answer,
        asked where the request does not say it, once the answer has begun. `model`: its name, as long as the answer
        does not say it."""
        self._max_tokens = max_tokens
        self._id = response_id
        self._facts = facts
        self._keep = keep
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        """Items, the last one open while the answer is being written."""
        self._is_open = False
        self._call_index = -1
        self._called = called_tools(facts.get("tools") or ())
        self._calls: list[dict[str, Any]] = []
        """Those of the answer, as a chat has them."""
        self._custom_text = CustomTextReader()
        """Of the call that is being written."""
        self._finish = "stop"
        self._usage: dict[str, Any] | None = None
        self._model = model
        self._has_begun = False
        self.error: dict[str, Any] | None = None
        """Why there is no answer, or not all of it."""
        self._raw: tuple[list[dict[str, Any]] | None, list[dict[str, Any]] | None] = (None, None)
        """Prompt and answer as text and as tokens, where they are told."""

    def whole(self, completion: dict[str, Any]) -> bytes:
        choice = completion["choices"][0]
        message = choice["message"]
        self._model, self._usage, self._finish = completion["model"], completion["usage"], choice["finish_reason"]
        if completion.get("prompt_token_ids") is not None:
            prompt = (completion["prompt_text"] or "", completion["prompt_token_ids"])
            self._raw = (_raw(*prompt), _raw(message.get("content") or "", choice["token_ids"] or []))
        logprobs = (choice.get("logprobs") or {}).get("content")
        if message.get("reasoning"):
            self._output.append(self._new_item("reasoning", message["reasoning"]))
        if message.get("content"):
            item = self._new_item("message", message["content"])
            item["content"][0]["logprobs"] = logprobs
            self._output.append(item)
        for call in message.get("tool_calls") or ():
            self._output.append(self._new_call(call["id"], call["function"]["name"], call["function"]["arguments"]))
        for item in self._output:  # vLLM's reading: what it thought before it answered has no status, but in a stream
            if "status" in item:
                item["status"] = None if item["type"] == "reasoning" else self._item_status()
        return self._finished()

    def event(self, chunk: dict[str, Any]) -> bytes:
        body = b"" if self._has_begun else self._begin(chunk["model"])
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning"):
                body += self._text("reasoning", delta["reasoning"])
            if delta.get("content"):
                body += self._text("message", delta["content"], (choice.get("logprobs") or {}).get("content"))
            for call in delta.get("tool_calls") or ():
                body += self._call(call)
            self._finish = choice.get("finish_reason") or self._finish
        return body

    def end(self) -> bytes:
        closed = self._close()
        response = self._finished()
        kind = b"response.incomplete" if self._finish == "length" else b"response.completed"
        return closed + self._event(kind.decode(), {"response": msgspec.Raw(response)})

    def failed(self, error: dict[str, Any], *, streamed: bool) -> bytes:
        self.error = error
        if not streamed:
            return encode({"error": error})
        return self._event("response.failed", {"response": self._failed()})

    def begin(self) -> bytes:
        """The events that a stream begins with, for a client that is to know of it before there are tokens; none where
        they have been sent."""
        return b"" if self._has_begun else self._begin(self._model)

    def queued(self) -> bytes:
        """The response before there is anything of it."""
        return encode(self._response("queued"))

    def given_up(self) -> bytes:
        """The response that has `failed`."""
        return encode(self._failed())

    def _failed(self) -> dict[str, Any]:
        assert self.error is not None, "it says why"
        return {**self._response("failed"), "error": {"code": "server_error", "message": self.error["message"]}}

    def _begin(self, model: str) -> bytes:
        self._model, self._has_begun = model, True
        response = self._response(_UNFINISHED)
        created = self._event("response.created", {"response": response})
        return created + self._event("response.in_progress", {"response": response})

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]] | None = None) -> bytes:
        body = b""
        if not self._is_open or self._output[-1]["type"] != kind:
            body = self._open(self._new_item(kind, ""))
        item = self._output[-1]
        item["content"][0]["text"] += text
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        fields: dict[str, Any] = {}
        if kind == "message":
            if logprobs:
                item["content"][0]["logprobs"] = [*(item["content"][0]["logprobs"] or ()), *logprobs]
            fields["logprobs"] = [_without_bytes(each) for each in logprobs or ()]
        return body + self._event(name, {**self._place(), "content_index": 0, "delta": text, **fields})

    def _call(self, call: dict[str, Any]) -> bytes:
        body, function = b"", call.get("function") or {}
        if not self._is_open or self._output[-1]["type"] not in _CALLS or call["index"] != self._call_index:
            self._call_index = call["index"]
            body, self._custom_text = self._close(), CustomTextReader()
            body += self._open(self._new_call(call.get("id") or "", function.get("name") or "", ""))
        arguments = function.get("arguments") or ""
        if not arguments:
            return body
        self._calls[-1]["function"]["arguments"] += arguments
        item = self._output[-1]
        if item["type"] == "custom_tool_call":
            return body + self._custom_delta(self._custom_text.add(arguments))
        item["arguments"] += arguments
        return body + self._event("response.function_call_arguments.delta", {**self._place(), "delta": arguments})

    def _custom_delta(self, added: str) -> bytes:
        if not added:
            return b""
        return self._event("response.custom_tool_call_input.delta", {**self._place(), "delta": added})

    def _open(self, item: dict[str, Any]) -> bytes:
        closed = self._close()
        self._output.append(item)
        self._is_open = True
        is_message = item["type"] == "message"
        shown = {**item, "content": [] if is_message else None} if "content" in item else item
        body = self._event("response.output_item.added", {"output_index": len(self._output) - 1, "item": shown})
        if "content" in item:
            part = {**item["content"][0], "logprobs": []} if is_message else item["content"][0]
            body += self._event("response.content_part.added", {**self._place(), "content_index": 0, "part": part})
        return closed + body

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._output[-1]
        if "status" in item:
            item["status"] = self._item_status()
        place, body = self._place(), b""
        if item["type"] == "custom_tool_call":
            body = self._custom_delta(self._custom_text.end())
            item["input"] = self._custom_text.text
            body += self._event("response.custom_tool_call_input.done", {**place, "input": item["input"]})
        elif item["type"] == "function_call":
            done = {**place, "name": item["name"], "arguments": item["arguments"]}
            body = self._event("response.function_call_arguments.done", done)
        else:
            part = item["content"][0]
            is_message = item["type"] == "message"
            name = "response.output_text.done" if is_message else "response.reasoning_text.done"
            fields: dict[str, Any] = {"logprobs": []} if is_message else {}
            body = self._event(name, {**place, "content_index": 0, "text": part["text"], **fields})
            body += self._event("response.content_part.done", {**place, "content_index": 0, "part": part})
        return body + self._event("response.output_item.done", {"output_index": place["output_index"], "item": item})

    def _new_call(self, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        tool = self._called.get(name, CalledTool(name))
        item = {"call_id": call_id, "name": tool.name, "namespace": tool.namespace, "async": None, "caller": None}
        if tool.is_custom:
            return {"type": "custom_tool_call", "id": self._item_id("ctc"), "input": custom_text(arguments), **item}
        item |= {"arguments": arguments, "status": _UNFINISHED}
        return {"type": "function_call", "id": self._item_id("fc"), **item}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id.partition('_')[2]}_{len(self._output)}"

    def _new_item(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            item = {"type": kind, "id": self._item_id("rs"), "summary": [], "content": content}
            return {**item, "encrypted_content": None, "status": _UNFINISHED}
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        return {
            "type": kind,
            "id": self._item_id("msg"),
            "role": "assistant",
            "content": [part],
            "status": _UNFINISHED,
            "phase": None,
        }

    def _finished(self) -> bytes:
        response = encode(self._response("incomplete" if self._finish == "length" else "completed"))
        self._keep(response, self._turn())
        return response

    def _turn(self) -> dict[str, Any]:
        """The answer as a chat message, for the responses that go on with it."""
        texts = [item["content"][0]["text"] for item in self._output if item["type"] == "message"]
        turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        return {**turn, "tool_calls": self._calls} if self._calls else turn

    def _response(self, status: str) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            **self._facts,
            "max_output_tokens": self._facts.get("max_output_tokens") or self._max_tokens(),
            "model": self._model,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": self._output,
            "input_messages": self._raw[0],
            "output_messages": self._raw[1],
            "usage": None if self._usage is None or status == _UNFINISHED else _usage(self._usage),
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _item_status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        told = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(told) + b"\n\n"


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    details = usage.get("completion_tokens_details") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": (usage.get("prompt_tokens_details") or {}).get("created_cache_tokens") or 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": details.get("reasoning_tokens") or 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage["total_tokens"],
    }


def _raw(text: str, token_ids: list[int]) -> list[dict[str, Any]]:
    """vLLM's `input_messages` and `output_messages`."""
    return [{"message": text, "tokens": token_ids, "type": "raw_message_tokens"}]


def _without_bytes(logprob: dict[str, Any]) -> dict[str, Any]:
    """As deltas hold them."""
    rivals = [{"token": each["token"], "logprob": each["logprob"]} for each in logprob["top_logprobs"]]
    return {"token": logprob["token"], "logprob": logprob["logprob"], "top_logprobs": rivals}
