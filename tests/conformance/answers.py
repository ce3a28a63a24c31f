"""What a server answers to a case, in a form in which two servers can be compared.

How a stream is cut into chunks depends on time, so its chunks are folded into one value: texts are joined, lists are
put one behind the other, and of everything else the last value holds.
"""

import base64
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import httpx
import ml_dtypes
import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.conformance.case import METRICS, Case

Json: TypeAlias = Any

TIMEOUT_S = 60.0
PAUSE_S = 0.1
"""Between two looks at a response that is being made."""
DONE = "[DONE]"
FLOATS = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
"""vLLM's names of the forms in which it sends vectors."""
JOINED = frozenset(
    ("content", "text", "reasoning", "arguments", "delta", "partial_json", "thinking", "input_json_delta")
)
"""Names of texts that a stream sends in pieces."""
WHOLE = frozenset(("response", "item", "part", "content_block", "message"))
"""Names of values that an event holds whole."""


@dataclass(frozen=True)
class Answer:
    """What came back: `body` is JSON, a text, or the folded events of a stream."""

    status: int
    content_type: str
    body: Json
    load: str = ""
    """The header with the load, without its numbers; empty: there is none."""

    def as_json(self) -> Json:
        return {"status": self.status, "content_type": self.content_type, "body": self.body, "load": self.load}


def ask(client: httpx.Client, case: Case) -> Answer:
    """The answer to a case, after the one that it goes on from. A server that does not answer has status 0."""
    path = case.path
    if case.after is not None:
        path = path.replace("{id}", _id_of(ask(client, case.after).body))
    answer = _asked(client, case, path)
    deadline_s = time.monotonic() + TIMEOUT_S
    while case.until_ended and _is_unfinished(answer.body) and time.monotonic() < deadline_s:
        time.sleep(PAUSE_S)
        answer = _asked(client, case, path)
    return answer


def _id_of(body: Json) -> str:
    """Of an answer, or of the response that a stream begins with."""
    if not isinstance(body, dict):
        return "none"
    created = body.get("events", {}).get("response.created", {}).get("all", {}).get("response", body)
    return str(created.get("id"))


def _is_unfinished(body: Json) -> bool:
    return isinstance(body, dict) and body.get("status") in ("queued", "in_progress")


def _asked(client: httpx.Client, case: Case, path: str) -> Answer:
    try:
        answered = client.request(
            case.method,
            path,
            content=case.raw if case.raw is not None else None if case.body is None else msgspec.json.encode(case.body),
            headers={"content-type": "application/json", **case.headers},
            timeout=TIMEOUT_S,
        )
    except httpx.HTTPError as error:
        return Answer(0, "", repr(error))
    content_type = answered.headers.get("content-type", "").partition(";")[0]
    if content_type == "text/event-stream":
        return Answer(answered.status_code, content_type, folded(events_of(answered.text)))
    if content_type == "application/octet-stream":
        metadata = answered.headers.get("metadata")
        said = None if metadata is None else msgspec.json.decode(metadata)
        body = {"metadata": said, "vectors": _numbers(answered.content, case)}
        return Answer(answered.status_code, content_type, body)
    if path == METRICS:
        return Answer(answered.status_code, content_type, metrics_of(answered.text))
    load = re.sub(r"\d+\.\d[\de.-]*", "N", answered.headers.get("endpoint-load-metrics", ""))
    try:
        body = _with_vectors(msgspec.json.decode(answered.content), case)
        return Answer(answered.status_code, content_type, body, load)
    except msgspec.DecodeError:
        return Answer(answered.status_code, content_type, answered.text)


def metrics_of(page: str) -> dict[str, Json]:
    """The type and the labels of each metric that vLLM has for its users; values are a matter of time."""
    return {
        family.name: {"type": family.type, **{name: "label" for each in family.samples for name in each.labels}}
        for family in text_string_to_metric_families(page)
        if family.name.startswith(("vllm:", "http_")) and not family.name.endswith("_created")
    }


def _with_vectors(body: Json, case: Case) -> Json:
    """Vectors in base64 as numbers, which need not be the same to the last bit."""
    if not isinstance(body, dict):
        return body
    for each in body.get("data") or () if isinstance(body.get("data"), list) else ():
        for name in ("embedding", "data"):
            if isinstance(each, dict) and isinstance(each.get(name), str):
                each[name] = {"base64": _numbers(base64.b64decode(each[name]), case)}
    by_type = body.get("embeddings")
    if isinstance(by_type, dict) and "base64" in by_type:  # Cohere's
        by_type["base64"] = [_numbers(base64.b64decode(each), case) for each in by_type["base64"]]
    return body


def _numbers(data: bytes, case: Case) -> list[float]:
    """Floats in the form that the case asks for."""
    asked = case.body or {}
    kind = np.dtype(FLOATS[asked.get("embed_dtype", "float32")])
    if asked.get("endianness") == "big":
        data = np.frombuffer(data, f"V{kind.itemsize}").view(np.uint8).reshape(-1, kind.itemsize)[:, ::-1].tobytes()
    return [float(each) for each in np.frombuffer(data, kind)]


def events_of(text: str) -> Iterator[tuple[str, str]]:
    """Type and data of each server-sent event; most have no type."""
    kind, data = "", []
    for line in (*text.splitlines(), ""):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif not line and data:
            yield kind, "\n".join(data)
            kind, data = "", []


def folded(events: Iterator[tuple[str, str]]) -> Json:
    """One value for all events of a stream: which types come in which order, what all of a type say together, in which
    of them each field is, and whether `[DONE]` ends them."""
    chunks: list[tuple[str, Json]] = []
    is_done = False
    for kind, data in events:
        if data == DONE:
            is_done = True
        else:
            chunks.append((kind, msgspec.json.decode(data)))
    by_type: dict[str, list[Json]] = {}
    for kind, chunk in chunks:
        by_type.setdefault(kind, []).append(chunk)
    return {
        "order": [kind for kind, _ in groupby(kind for kind, _ in chunks)],
        "done": is_done,
        "events": {
            kind: {"all": _together(of_type), "fields": _presence(of_type)} for kind, of_type in by_type.items()
        },
    }


def _together(chunks: Sequence[Json]) -> Json:
    whole: Json = {}
    for chunk in chunks:
        whole = _fold("", whole, chunk)
    return whole


def _fold(name: str, before: Json, value: Json) -> Json:
    if before is None or name in WHOLE:
        return value
    if value is None:
        return before
    if isinstance(before, dict) and isinstance(value, Mapping):
        return {key: _fold(key, before.get(key), value.get(key)) for key in {**before, **value}}
    if isinstance(before, list) and isinstance(value, list):
        if all(isinstance(each, dict) and "index" in each for each in (*before, *value)):
            by_index = {each["index"]: each for each in before}
            for each in value:
                by_index[each["index"]] = _fold("", by_index.get(each["index"]), each)
            return [by_index[index] for index in sorted(by_index)]
        return before + value
    if isinstance(before, str) and isinstance(value, str) and name in JOINED:
        return before + value
    return value


def _presence(chunks: Sequence[Json]) -> dict[str, str]:
    """For each path, whether `all` or only `some` of the chunks have it, null or not."""
    found = Counter(path for chunk in chunks for path in set(_paths("", chunk)))
    return {path: "all" if count == len(chunks) else "some" for path, count in sorted(found.items())}


def _paths(path: str, value: Json) -> Iterator[str]:
    if path.endswith(".top_logprobs[]") and isinstance(value, dict) and "token" not in value:
        yield path  # by token: which ones are in a chunk is a matter of time
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _paths(f"{path}.{key}", below)
    elif isinstance(value, list):
        for below in value:
            yield from _paths(f"{path}[]", below)
    elif value is not None or ".delta" not in path:  # a null in a delta adds nothing
        yield path
