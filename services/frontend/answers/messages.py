"""Answers in the form of Anthropic's Messages API, made of those of a chat completion (pure)."""

from typing import Any, Final

import msgspec
from xxhash import xxh3_128_hexdigest

from services.frontend.answers.sse import encode

_ERROR_TYPES: Final = {
    "invalid_request_error": "invalid_request_error",
    "rate_limit_error": "rate_limit_error",
    "server_error": "api_error",
}


class MessagesTranslator:
    """A `Translator` of one answer."""

    def __init__(self, message_id: str) -> None:
        self._id = message_id
        self._began = False
        self._block: str | None = None
        """Type of the block that is open."""
        self._blocks = 0
        self._thought = ""
        """The reasoning of the block that is open."""
        self._calls = -1
        """Index of the call whose arguments are being written."""
        self._arguments: list[str] | None = None
        """What has been written of them; None: there is no call."""
        self._said_amid: list[str] = []
        """Text that came while the block of a call was open: it gets a block behind that."""
        self._finish = "stop"
        self._stop_reason: int | str | None = None
        self._usage: dict[str, Any] = {}

    def whole(self, completion: dict[str, Any]) -> bytes:
        choice = completion["choices"][0]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        arguments: str | None = None
        if message.get("reasoning"):
            thought = message["reasoning"]
            content.append({"type": "thinking", "thinking": thought, "signature": _signature(thought)})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function["arguments"]
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function)})
        return encode(
            {
                **self._message(completion["model"]),
                "content": content or [{"type": "text", "text": ""}],
                **_stop(choice["finish_reason"], choice["stop_reason"], arguments),
                "usage": _usage(completion["usage"]),
            }
        )

    def event(self, chunk: dict[str, Any]) -> bytes:
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        body = b"" if self._began else self._begin(chunk["model"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning"):
                self._thought += delta["reasoning"]
                body += self._delta("thinking", {"type": "thinking_delta", "thinking": delta["reasoning"]})
            if delta.get("content") and self._block == "tool_use":
                self._said_amid.append(delta["content"])
            elif delta.get("content"):
                body += self._delta("text", {"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls") or ():
                body += self._call(call)
            self._finish = choice.get("finish_reason") or self._finish
            self._stop_reason = choice.get("stop_reason") or self._stop_reason
        return body

    def end(self) -> bytes:
        opened = b"" if self._blocks else self._open("text", {"type": "text", "text": ""})
        arguments = None if self._arguments is None else "".join(self._arguments)
        delta = _stop(self._finish, self._stop_reason, arguments)
        return (
            opened
            + self._close()
            + _event("message_delta", {"delta": delta, "usage": _usage(self._usage)})
            + _event("message_stop", {})
        )

    def failed(self, error: dict[str, Any], *, streamed: bool) -> bytes:
        code = error.get("code")
        kind = {"model_not_found": "not_found_error", "invalid_api_key": "authentication_error"}.get(
            str(code), _ERROR_TYPES.get(error["type"], "api_error")
        )
        told = {"error": {"type": kind, "message": error["message"]}}
        return _event("error", told) if streamed else encode({"type": "error", **told})

    def _begin(self, model: str) -> bytes:
        self._began = True
        message = {**self._message(model), "content": [], "stop_reason": None, "usage": _usage(self._usage)}
        return _event("message_start", {"message": message})

    def _message(self, model: str) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": model, "stop_sequence": None}

    def _delta(self, kind: str, delta: dict[str, Any]) -> bytes:
        body = b""
        if self._block != kind:
            body = self._open(kind, {"type": kind, kind: ""})
        return body + self._block_delta(delta)

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _call(self, call: dict[str, Any]) -> bytes:
        body, function = b"", call.get("function") or {}
        if call["index"] != self._calls:
            self._calls, self._arguments = call["index"], []
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": call.get("id") or "",
                "name": function.get("name") or "",
                "input": {},
            }
            body = self._open("tool_use", block)
        if function.get("arguments") and self._block == "tool_use" and self._arguments is not None:
            self._arguments.append(function["arguments"])
            body += self._block_delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        return body

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._block = kind
        self._blocks += 1
        return closed + _event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _close(self) -> bytes:
        if self._block is None:
            return b""
        signed = b""
        if self._block == "thinking":
            signed = self._block_delta({"type": "signature_delta", "signature": _signature(self._thought)})
        closed = signed + _event("content_block_stop", {"index": self._blocks - 1})
        text, self._block, self._thought, self._said_amid = "".join(self._said_amid), None, "", []
        return closed + (self._delta("text", {"type": "text_delta", "text": text}) + self._close() if text else b"")


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def _signature(thought: str) -> str:
    """Clients want one of each thought. Nobody checks it: any thought may be sent back."""
    return xxh3_128_hexdigest(thought.encode())


def _stop(finish: str, found: int | str | None, arguments: str | None) -> dict[str, str | None]:
    """`found`: the stop string that ended the answer, if one has; `arguments`: those of the last call, None if there is
    none. A call that a stop string or the limit cut off is not to be carried out."""
    reason = "end_turn" if arguments is None and finish != "tool_calls" else "tool_use"
    if finish == "length":
        reason = "max_tokens"
    elif isinstance(found, str) and not _is_json(arguments or ""):
        return {"stop_reason": "stop_sequence", "stop_sequence": found}
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    """Anthropic counts the tokens found in a cache, and those that are in it from now on, apart from the others."""
    details = usage.get("prompt_tokens_details") or {}
    cached, created = details.get("cached_tokens") or 0, details.get("created_cache_tokens") or 0
    return {
        "input_tokens": max(0, usage.get("prompt_tokens", 0) - cached - created),
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def _input(function: dict[str, Any]) -> Any:
    """The arguments as an object; as a text under `arguments` where they are none, because the answer was cut."""
    try:
        found = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return {"arguments": function["arguments"]}
    return found if isinstance(found, dict) else {"arguments": found}
