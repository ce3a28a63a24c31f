"""A client that reads a streamed answer event by event and can go on with it over another connection."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import httpx

DEADLINE_S = 60.0


class ResumingClient:
    """Of one streamed answer; `text` and the rest are what has come so far, over all its connections."""

    def __init__(
        self, body: dict[str, Any], path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> None:
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._path = path
        self._headers = {"x-penstock-event-ids": "true", **(headers or {})}
        self.request_id = ""
        self.last_event_id = ""
        self.event_ids: list[str] = []
        self.texts: defaultdict[int, str] = defaultdict(str)
        self.token_ids: defaultdict[int, list[int]] = defaultdict(list)
        """Where they are asked for."""
        self.call_ids: list[str] = []
        """Of calls of tools, whose names and arguments are part of the texts."""
        self.finishes: dict[int, str] = {}
        self.usage: dict[str, Any] | None = None
        self.is_done = False
        self.heads = 0
        """Chunks that said whose turn it is: the first ones of a chat."""

    @property
    def answer(self) -> tuple[dict[int, str], dict[int, str], int]:
        """Texts, finish reasons and number of tokens; of a stream that is done."""
        assert self.is_done
        assert self.usage is not None
        return dict(self.texts), self.finishes, int(self.usage["completion_tokens"])

    async def ask(self, http: httpx.AsyncClient, most_events: int | None = None) -> None:
        """Ask, and read so many events, or all."""
        async with http.stream("POST", self._path, json=self._body, headers=self._headers) as response:
            assert response.status_code == 200, await response.aread()
            self.request_id = response.headers["x-request-id"]
            await self._read(response, most_events)

    async def resume(self, http: httpx.AsyncClient, most_events: int | None = None) -> None:
        """Go on behind the last event that was read."""
        headers = {**self._headers, **({"last-event-id": self.last_event_id} if self.last_event_id else {})}
        path = f"/v1/requests/{self.request_id}/events"
        async with http.stream("GET", path, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["x-request-id"] == self.request_id
            await self._read(response, most_events)

    async def _read(self, response: httpx.Response, most_events: int | None) -> None:
        events = 0
        try:
            async for event_id, data in _events(response):
                self._take(data)
                if event_id:
                    self.last_event_id = event_id
                    self.event_ids.append(event_id)
                events += 1
                if events == most_events:
                    return
        except httpx.TransportError:  # its frontend has died
            return

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            self.heads += "role" in delta
            self.texts[choice["index"]] += choice.get("text", delta.get("content")) or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                self.call_ids += [call["id"]] if "id" in call else []
                self.texts[choice["index"]] += (f"[{function['name']}]" if "name" in function else "") + function.get(
                    "arguments", ""
                )
            self.token_ids[choice["index"]] += choice.get("token_ids") or []
            if choice["finish_reason"]:
                assert choice["index"] not in self.finishes, "an end came twice"
                self.finishes[choice["index"]] = choice["finish_reason"]


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    event_id = data = ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            yield event_id, data
            event_id = data = ""
