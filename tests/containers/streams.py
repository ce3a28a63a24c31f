"""Streams through a mesh whose containers are being broken."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

STREAMS: Final = 12
TOKENS: Final = 400


def request(number: int) -> dict[str, Any]:
    prompt = [100 + (number * 37 + position * 11) % 400 for position in range(60)]
    body = {"model": "demo-large", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return {**body, "stream": True}


def streamed(url: str, number: int, began: threading.Event | None = None) -> str:
    """The text of one stream. Raises if it fails or has another end than its length."""
    text, finish = "", ""
    with httpx.stream("POST", f"{url}/v1/completions", json=request(number), timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text, finish = text + choice["text"], choice["finish_reason"] or finish
            if began is not None:
                began.set()
    assert finish == "length"
    return text


def undisturbed(url: str) -> list[str]:
    """What the streams say when nothing happens."""
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: streamed(url, number), range(STREAMS)))


def disturbed(url: str, disturb: Callable[[], None]) -> list[str]:
    """The streams' texts, with something done to the mesh once all of them have begun."""
    began = [threading.Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(streamed, url, number, event) for number, event in enumerate(began)]
        assert all(event.wait(60) for event in began)
        disturb()
        return [future.result(120) for future in running]
