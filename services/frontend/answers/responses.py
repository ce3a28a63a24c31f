"""Answers in the form of OpenAI's Responses API, made of those of a chat completion (pure)."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from services.frontend.answers.sse import encode

_UNFINISHED: Final = "in_progress"

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
        self._calls = -1
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
            function = call["function"]
            item = self._new_item("function_call", function["arguments"], call["id"], function["name"])
            self._output.append(item)
        for item in self._output:  # vLLM's reading: what it thought before it answered has no status, but in a stream
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
        if not self._is_open or self._output[-1]["type"] != "function_call" or call["index"] != self._calls:
            self._calls = call["index"]
            body = self._open(self._new_item("function_call", "", call.get("id") or "", function.get("name") or ""))
        arguments = function.get("arguments") or ""
        if arguments:
            self._output[-1]["arguments"] += arguments
            body += self._event("response.function_call_arguments.delta", {**self._place(), "delta": arguments})
        return body

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
        item["status"] = self._item_status()
        place, body = self._place(), b""
        if item["type"] == "function_call":
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

    def _new_item(self, kind: str, text: str, call_id: str = "", name: str = "") -> dict[str, Any]:
        number = len(self._output)
        own = self._id.partition("_")[2]
        if kind == "function_call":
            return {
                "type": kind,
                "id": f"fc_{own}_{number}",
                "call_id": call_id,
                "name": name,
                "arguments": text,
                "status": _UNFINISHED,
            }
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            item = {"type": kind, "id": f"rs_{own}_{number}", "summary": [], "content": content}
            return {**item, "encrypted_content": None, "status": _UNFINISHED}
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        return {
            "type": kind,
            "id": f"msg_{own}_{number}",
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
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self._output
            if item["type"] == "function_call"
        ]
        turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        return {**turn, "tool_calls": calls} if calls else turn

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
