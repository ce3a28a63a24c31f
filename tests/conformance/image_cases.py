"""Images: in every API that takes them, and what is refused."""

from base64 import b64encode
from typing import Any

from tests.conformance.case import CHAT, MESSAGES, RESPONSES, Case
from tests.vllm.tiny_images import png

WHAT = {"type": "text", "text": "What is on this?"}
CAT, DOG = png(3), png(5, 33, 21)


def _data(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def _image(url: str = _data(CAT), **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def _shown(subject: str, name: str, path: str, **fields: Any) -> Case:
    body = {"model": "eyes", "temperature": 0, **fields}
    given = {key: value for key, value in body.items() if value is not ...}
    return Case(f"{subject}: images, {name}", path, given, served="eyes")


def _chat(name: str, *parts: dict[str, Any], **fields: Any) -> Case:
    return _shown(
        "chat", name, CHAT, **{"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 12, **fields}
    )


CASES = [
    _chat("none", WHAT),
    _chat("one", WHAT, _image(), return_token_ids=True),
    _chat("one, streamed", WHAT, _image(), stream=True, stream_options={"include_usage": True}),
    _chat("one before the text", _image(), WHAT),
    _chat("one without a text", _image()),
    _chat("two", WHAT, _image(), _image(_data(DOG)), logprobs=True, top_logprobs=2),
    _chat("the same twice", WHAT, _image(), _image()),
    _chat("detail", WHAT, _image(detail="high")),
    _chat("uuid", WHAT, {**_image(), "uuid": "a"}),
    _chat("an unknown uuid alone", WHAT, {"type": "image_url", "image_url": None, "uuid": "nobody"}),
    _chat("a uuid alone", WHAT, {"type": "image_url", "image_url": None, "uuid": "a"}, return_token_ids=True),
    _chat("a uuid without a url", WHAT, {"type": "image_url", "image_url": {}, "uuid": "a"}),
    _chat("a uuid without its field", WHAT, {"type": "image_url", "uuid": "a"}),
    _chat("a flat url", WHAT, {"type": "image_url", "image_url": _data(CAT)}),
    _chat("no url", WHAT, {"type": "image_url", "image_url": {}}),
    _chat("an empty url", WHAT, _image("")),
    _chat("no type", WHAT, {"image_url": {"url": _data(CAT)}}),
    _chat("no base64", WHAT, _image("data:image/png;base64,???")),
    _chat("no picture", WHAT, _image(_data(b"no picture"))),
    _chat("another kind", WHAT, _image(_data(CAT, "image/jpeg"))),
    _chat("no kind", WHAT, _image(f"data:,{b64encode(CAT).decode()}")),
    _chat("an unknown scheme", WHAT, _image("gopher://127.0.0.1/a.png")),
    _chat("a file", WHAT, _image("file:///nowhere/a.png")),
    _chat("a host that is away", WHAT, _image("http://127.0.0.1:9/a.png")),
    _chat("audio", WHAT, {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}),
    _chat("video", WHAT, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}}),
    _chat("n", WHAT, _image(), n=2, temperature=1, seed=7),
    _chat("beam search", WHAT, _image(), use_beam_search=True, n=2, max_tokens=4),
    _chat("prompt_logprobs", WHAT, _image(), prompt_logprobs=1),
    _chat("truncated", WHAT, _image(), truncate_prompt_tokens=9),
    _chat("json", WHAT, _image(), response_format={"type": "json_object"}),
    _chat(
        "of the system",
        WHAT,
        messages=[{"role": "system", "content": [_image()]}, {"role": "user", "content": [WHAT]}],
    ),
    _chat(
        "of an earlier turn",
        WHAT,
        messages=[
            {"role": "user", "content": [WHAT, _image()]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": [WHAT, _image(_data(DOG))]},
        ],
    ),
    _shown(
        "tokenizer", "a chat", "/tokenize", messages=[{"role": "user", "content": [WHAT, _image()]}], temperature=...
    ),
    _shown(
        "responses",
        "one",
        RESPONSES,
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": _data(CAT)}],
            }
        ],
        max_output_tokens=12,
    ),
    _shown(
        "messages",
        "one",
        MESSAGES,
        messages=[
            {
                "role": "user",
                "content": [
                    WHAT,
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": b64encode(CAT).decode()},
                    },
                ],
            }
        ],
        max_tokens=12,
    ),
    _shown(
        "messages",
        "a url",
        MESSAGES,
        messages=[{"role": "user", "content": [WHAT, {"type": "image", "source": {"type": "url", "url": _data(CAT)}}]}],
        max_tokens=12,
    ),
]
