"""LoRA adapters: as models, loaded and unloaded."""

from typing import Any

from tests.conformance.case import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Case
from tests.conformance.chat_cases import ADD, STREAMED
from tests.conformance.made_models import LOADABLE, LOADED
from tests.conformance.other_cases import ASKED

SUBJECTS = {
    CHAT: "chat",
    COMPLETIONS: "completions",
    MESSAGES: "messages",
    RESPONSES: "responses",
    "/tokenize": "tokenizer",
    "/detokenize": "tokenizer",
    "/v1/embeddings": "embeddings",
}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def _adapted(name: str, path: str, /, **fields: Any) -> Case:
    """A field that is `...` is left out."""
    subject = SUBJECTS.get(path, "server")
    body = {key: value for key, value in fields.items() if value is not ...}
    return Case(f"{subject}: adapters, {name}", path, body, served="adapted")


def _read(name: str, path: str) -> Case:
    return Case(f"server: GET {path}, {name}", path, method="GET", served="adapted")


def _asked(name: str, path: str = CHAT, /, **fields: Any) -> Case:
    given: dict[str, Any] = {"model": LOADED, "max_tokens": 12, "temperature": 0}
    given |= {"prompt": ASKED} if path == COMPLETIONS else {"messages": ADD}
    return _adapted(name, path, **{**given, **fields})


def _load(name: str, **fields: Any) -> Case:
    return _adapted(f"load, {name}", LOAD, **{"lora_name": LOADABLE, "lora_path": LOADABLE, **fields})


def _unload(name: str, **fields: Any) -> Case:
    return _adapted(f"unload, {name}", UNLOAD, **{"lora_name": LOADABLE, **fields})


def _invoked(name: str, adapter: str, /, **fields: Any) -> Case:
    """As SageMaker names an adapter."""
    headers = {"x-amzn-sagemaker-adapter-identifier": adapter}
    body = {"max_tokens": 12, "temperature": 0, **fields}
    return Case(f"server: adapters, invocations {name}", "/invocations", body, headers=headers, served="adapted")


CASES = [
    _read("an adapter", "/v1/models"),
    _read("an adapter", f"/v1/models/{LOADED}"),
    _asked("a chat"),
    _asked("a chat, streamed", **STREAMED),
    _asked("a chat of the model", model="adapted"),
    _asked("a chat of an unknown one", model=LOADABLE),
    _asked("a completion", COMPLETIONS),
    _asked("a completion, streamed", COMPLETIONS, stream=True),
    _asked("a completion with logprobs", COMPLETIONS, logprobs=2, return_token_ids=True),
    _asked("a chat with prompt_logprobs", prompt_logprobs=1),
    _asked("several answers", n=2, temperature=1, seed=3),
    _asked("beam search", use_beam_search=True, n=2, max_tokens=4),
    _asked("a message", MESSAGES),
    _adapted("a response", RESPONSES, model=LOADED, input=ASKED, max_output_tokens=12, temperature=0),
    _adapted("batch of chats", f"{CHAT}/batch", model=LOADED, messages=[ADD, ADD], max_tokens=3, temperature=0),
    _adapted("invocations", "/invocations", model=LOADED, messages=ADD, max_tokens=3, temperature=0),
    _adapted("tokens", "/tokenize", model=LOADED, prompt=ASKED),
    _adapted("tokens of a chat", "/tokenize", model=LOADED, messages=ADD),
    _adapted("a text of tokens", "/detokenize", model=LOADED, tokens=[300, 301]),
    _adapted("a prompt", f"{CHAT}/render", model=LOADED, messages=ADD),
    _adapted("a vector", "/v1/embeddings", model=LOADED, input=ASKED),
    _adapted("tokens of an unknown one", "/tokenize", model="nobody", prompt=ASKED),
    _load("no name", lora_name=...),
    _load("no path", lora_path=...),
    _load("an empty name", lora_name=""),
    _load("a name of the model", lora_name="adapted"),
    _load("a name that is taken", lora_name=LOADED),
    _load("a path to nothing", lora_path="nowhere"),
    _load("a path to something else", lora_path="model"),
    _load("no JSON object", lora_name=[1]),
    _unload("no name", lora_name=...),
    _unload("an unknown one", lora_name="nobody"),
    _load("and an unknown parameter", lora_mood="good"),
    _read("two adapters", "/v1/models"),
    _asked("a chat of what was loaded", model=LOADABLE),
    _load("twice"),
    _load("in place", load_inplace=True),
    _load("another in place", load_inplace=True, lora_path=LOADED),
    _asked("a chat of what was replaced", model=LOADABLE),
    _unload("by name and number", lora_int_id=2),
    _asked("a chat of what was unloaded", model=LOADABLE),
    _unload("twice"),
    _adapted("register", "/adapters", name=LOADABLE, src=LOADABLE, preload=True, pin=False),
    _adapted("register, twice", "/adapters", name=LOADABLE, src=LOADABLE),
    _adapted("register, no src", "/adapters", name=LOADABLE),
    _adapted("register, an empty name", "/adapters", name="", src=LOADABLE),
    _adapted("register, a path to nothing", "/adapters", name="nobody", src="nowhere"),
    _invoked("of the header", LOADABLE, messages=ADD),
    _invoked("of the header, a prompt", LOADABLE, prompt=ASKED, model="adapted"),
    _invoked("of an unknown one", "nobody", messages=ADD),
    Case("server: adapters, unregister", f"/adapters/{LOADABLE}", method="DELETE", served="adapted"),
    Case("server: adapters, unregister, twice", f"/adapters/{LOADABLE}", method="DELETE", served="adapted"),
]
