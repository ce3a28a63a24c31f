"""Embeddings, poolings, classes, scores and rankings, of models that are converted to pooling models."""

from typing import Any

from tests.conformance.case import CHAT, COMPLETIONS, Case

TEXT, OTHER = "Add 4991 and 6299.", "The capital of France is Paris."
GENERATIVE = {"query": TEXT, "items": [OTHER], "label_token_ids": [300]}
TURNS = [{"role": "user", "content": TEXT}]
LONG_CHAT = [*TURNS, {"role": "assistant", "content": "11290"}, {"role": "user", "content": OTHER}]
TOO_LONG = [7] * 5000
IMAGE = "data:image/png;base64,iVBORw0KGgo="
"""No more than the beginning of one: whoever takes text only does not look."""


def _asked(subject: str, model: str, name: str, path: str, defaults: dict[str, Any], fields: dict[str, Any]) -> Case:
    """A field that is `...` is left out."""
    body = {"model": model} | defaults | fields
    given = {key: value for key, value in body.items() if value is not ...}
    return Case(f"{subject}: {name}", path, given, served=model)


def embedding(name: str, **fields: Any) -> Case:
    return _asked("embeddings", "vectors", name, "/v1/embeddings", {"input": TEXT}, fields)


def cohere(name: str, **fields: Any) -> Case:
    return _asked("embeddings", "vectors", f"Cohere's, {name}", "/v2/embed", {"texts": [TEXT, OTHER]}, fields)


def pooling(name: str, model: str = "vectors", **fields: Any) -> Case:
    return _asked("pooling", model, name, "/pooling", {"input": TEXT}, fields)


def classes(name: str, model: str = "classes", **fields: Any) -> Case:
    return _asked("classes", model, name, "/classify", {"input": TEXT}, fields)


def score(name: str, model: str = "vectors", path: str = "/score", **fields: Any) -> Case:
    return _asked("scores", model, name, path, {}, fields)


def ranking(name: str, model: str = "vectors", path: str = "/rerank", **fields: Any) -> Case:
    return _asked("scores", model, name, path, {"query": TEXT, "documents": [OTHER, TEXT, "Add 1 and 2."]}, fields)


ENCODINGS = [
    (encoding, dtype, endianness)
    for encoding in ("base64", "bytes", "bytes_only")
    for dtype, endianness in (
        *(("float32", "little"), ("float32", "big"), ("float16", "native"), ("bfloat16", "little")),
        *(("bfloat16", "big"), ("fp8_e4m3", "native"), ("fp8_e5m2", "native")),
    )
]

EMBEDDING_CASES = [
    embedding("plain"),
    embedding("several", input=[TEXT, OTHER]),
    embedding("tokens", input=[1, 20, 300]),
    embedding("tokens of several", input=[[1, 20, 300], [4]]),
    embedding("texts and tokens", input=[TEXT, [1, 20, 300]]),
    embedding("model left out", model=...),
    embedding("model null", model=None),
    embedding("model unknown", model="nobody"),
    embedding("input missing", input=...),
    embedding("input null", input=None),
    embedding("input empty", input=""),
    embedding("input of nothing", input=[]),
    embedding("input of no tokens", input=[[]]),
    embedding("input of a number", input=7),
    embedding("input of a blank", input=" "),
    embedding("token beyond the vocabulary", input=[600_000]),
    embedding("token below zero", input=[-1]),
    embedding("too long", input=TOO_LONG),
    embedding("too long a text", input="add " * 5000),
    embedding("encoding_format float", encoding_format="float"),
    embedding("encoding_format unknown", encoding_format="hex"),
    embedding("encoding_format null", encoding_format=None),
    embedding("embed_dtype of floats", embed_dtype="float16"),
    embedding("embed_dtype unknown", encoding_format="base64", embed_dtype="float8"),
    embedding("endianness unknown", encoding_format="base64", endianness="middle"),
    *(
        embedding(
            f"{encoding}, {dtype}, {endianness}",
            input=[TEXT, OTHER],
            encoding_format=encoding,
            embed_dtype=dtype,
            endianness=endianness,
        )
        for encoding, dtype, endianness in ENCODINGS
    ),
    embedding("base64", encoding_format="base64"),
    embedding("bytes", encoding_format="bytes"),
    embedding("dimensions", dimensions=8),
    embedding("dimensions 0", dimensions=0),
    embedding("dimensions null", dimensions=None),
    embedding("use_activation", use_activation=True),
    embedding("use_activation false", use_activation=False),
    embedding("normalize", normalize=False),
    embedding("truncate_prompt_tokens 3", truncate_prompt_tokens=3),
    embedding("truncate_prompt_tokens 3, tokens", truncate_prompt_tokens=3, input=[5, 6, 7, 8]),
    embedding("truncate_prompt_tokens -1", truncate_prompt_tokens=-1, input=TOO_LONG),
    embedding("truncate_prompt_tokens -2", truncate_prompt_tokens=-2),
    embedding("truncate_prompt_tokens 0", truncate_prompt_tokens=0),
    embedding("truncate_prompt_tokens beyond the context", truncate_prompt_tokens=5000),
    embedding("truncation_side left", truncate_prompt_tokens=3, truncation_side="left"),
    embedding("truncation_side right", truncate_prompt_tokens=3, truncation_side="right"),
    embedding("truncation_side left, tokens", truncate_prompt_tokens=2, truncation_side="left", input=[5, 6, 7, 8]),
    embedding("truncation_side unknown", truncation_side="middle"),
    embedding("padding", padding="do_not_pad"),
    embedding("padding unknown", padding="some"),
    embedding("padding to the longest input", padding="max_length"),
    embedding("add_special_tokens false", add_special_tokens=False),
    embedding("user", user="ann"),
    embedding("request_id", request_id="mine"),
    embedding("priority 0", priority=0),
    embedding("cache_salt", cache_salt="c2FsdA"),
    embedding("cache_salt empty", cache_salt=""),
    embedding("cache_salt with a slash", cache_salt="a/b"),
    embedding("mm_processor_kwargs", mm_processor_kwargs={}),
    embedding("mm_processor_kwargs of something", mm_processor_kwargs={"a": 1}),
    embedding("unknown parameter", mood="good"),
    embedding("a chat", input=..., messages=TURNS),
    embedding("a chat of turns", input=..., messages=LONG_CHAT),
    embedding("a chat of parts", input=..., messages=[{"role": "user", "content": [{"type": "text", "text": TEXT}]}]),
    embedding("a chat and a generation prompt", input=..., messages=TURNS, add_generation_prompt=True),
    embedding("a chat continued", input=..., messages=TURNS, continue_final_message=True),
    embedding(
        "a chat continued and begun",
        input=...,
        messages=TURNS,
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    embedding("a chat and special tokens", input=..., messages=TURNS, add_special_tokens=True),
    embedding("a chat and a template", input=..., messages=TURNS, chat_template="{{ messages[0]['content'] }}"),
    embedding("a chat and variables", input=..., messages=TURNS, chat_template_kwargs={"enable_thinking": False}),
    embedding("a chat in base64", input=..., messages=TURNS, encoding_format="base64"),
    embedding("a chat cut", input=..., messages=TURNS, truncate_prompt_tokens=4),
    embedding("a chat of nothing", input=..., messages=[]),
    embedding("a chat of an unknown form", input=..., messages=[{"content": "x"}]),
    embedding("several chats", input=..., messages=[TURNS, LONG_CHAT]),
    embedding("a chat as input", input=TURNS),
    embedding("several chats as input", input=[TURNS, LONG_CHAT]),
    embedding(
        "an image",
        input=...,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}],
    ),
    cohere("plain"),
    cohere("types", embedding_types=["float", "binary", "ubinary", "base64"]),
    cohere("type unknown", embedding_types=["int4"]),
    cohere("input_type", input_type="search_query"),
    cohere("nothing", texts=...),
    cohere("no texts", texts=[]),
    cohere("texts and images", images=[IMAGE]),
    cohere("images", texts=..., images=[IMAGE]),
    cohere("inputs", texts=..., inputs=[{"content": [{"type": "text", "text": TEXT}]}]),
    cohere("inputs of nothing", texts=..., inputs=[{"content": [{"type": "text"}]}]),
    cohere("output_dimension", output_dimension=8),
    cohere("truncate NONE", truncate="NONE"),
    cohere("truncate END", truncate="END", max_tokens=3),
    cohere("truncate START", truncate="START", max_tokens=3),
    cohere("truncate unknown", truncate="MIDDLE"),
    cohere("max_tokens exceeded", truncate="NONE", max_tokens=3),
    cohere("too long", texts=["add " * 5000]),
    cohere("too long, truncate NONE", texts=["add " * 5000], truncate="NONE"),
    cohere("priority", priority=0),
    cohere("unknown parameter", mood="good"),
]

POOLING_CASES = [
    pooling("plain"),
    pooling("texts and tokens", input=[TEXT, [1, 20, 300]]),
    pooling("several texts", input=[TEXT, OTHER]),
    pooling("task embed", task="embed"),
    pooling("task token_embed", task="token_embed"),
    pooling("task classify", task="classify"),
    pooling("task unknown", task="dance"),
    pooling("task removed", task="encode"),
    pooling("task plugin", task="plugin"),
    pooling("dimensions", dimensions=8),
    pooling("base64", encoding_format="base64"),
    pooling("bytes", encoding_format="bytes", input=[TEXT, OTHER]),
    pooling("bytes_only", encoding_format="bytes_only"),
    pooling("float16", encoding_format="base64", embed_dtype="float16"),
    pooling("use_activation false", use_activation=False),
    pooling("a chat", input=..., messages=TURNS),
    pooling("several chats", input=..., messages=[TURNS, LONG_CHAT]),
    pooling("data", input=..., data={"a": 1}),
    pooling("truncate_prompt_tokens", truncate_prompt_tokens=3),
    pooling("unknown parameter", mood="good"),
    pooling("of a classifier", model="classes"),
    pooling("of a classifier, several", model="classes", input=[TEXT, OTHER]),
    pooling("of a classifier, task classify", model="classes", task="classify"),
    pooling("of a classifier, task token_classify", model="classes", task="token_classify"),
    pooling("of a classifier, task embed", model="classes", task="embed"),
    Case("server: GET /v1/models, a pooling model", "/v1/models", method="GET", served="vectors"),
    Case("pooling: a chat's answer", CHAT, {"model": "vectors", "messages": TURNS}, served="vectors"),
    Case("pooling: a completion", COMPLETIONS, {"model": "vectors", "prompt": TEXT}, served="vectors"),
    Case("pooling: invocations", "/invocations", {"model": "vectors", "input": TEXT}, served="vectors"),
    Case("pooling: invocations, a chat", "/invocations", {"model": "vectors", "messages": TURNS}, served="vectors"),
    Case("classes: invocations", "/invocations", {"model": "classes", "input": TEXT}, served="classes"),
    Case("scores: generative, a pooling model", "/generative_scoring", GENERATIVE | {"model": "ranks"}, served="ranks"),
    Case("scores: invocations", "/invocations", {"model": "ranks", "text_1": TEXT, "text_2": OTHER}, served="ranks"),
    Case("scores: invocations, ranking", "/invocations", {"query": TEXT, "documents": [OTHER]}, served="ranks"),
    Case("pooling: invocations of token vectors", "/invocations", {"input": TEXT}, served="tokens"),
    Case("pooling: tokens of a text", "/tokenize", {"model": "vectors", "prompt": TEXT}, served="vectors"),
    Case("classes: of a model without", "/classify", {"model": "vectors", "input": TEXT}, served="vectors"),
]

CLASSES_CASES = [
    classes("plain"),
    classes("several", input=[TEXT, OTHER]),
    classes("tokens", input=[1, 20, 300]),
    classes("input missing", input=...),
    classes("input of nothing", input=[]),
    classes("use_activation", use_activation=True),
    classes("use_activation false", use_activation=False),
    classes("a chat", input=..., messages=TURNS),
    classes("several chats", input=..., messages=[TURNS, LONG_CHAT]),
    classes("truncate_prompt_tokens", truncate_prompt_tokens=3),
    classes("add_special_tokens false", add_special_tokens=False),
    classes("normalize", normalize=True),
    classes("encoding_format", encoding_format="base64"),
    classes("unknown parameter", mood="good"),
    classes("of a model with one class", model="ranks"),
    Case("classes: vectors of none", "/v1/embeddings", {"model": "classes", "input": TEXT}, served="classes"),
    score("of a model with several classes", model="classes", text_1=TEXT, text_2=OTHER),
]


def scoring_cases(model: str, kind: str) -> list[Case]:
    """What is asked of vectors and of a cross-encoder alike."""

    def one(name: str, **fields: Any) -> Case:
        return score(f"{kind}, {name}", model=model, **fields)

    def ranked(name: str, **fields: Any) -> Case:
        return ranking(f"{kind}, ranking, {name}", model=model, **fields)

    return [
        one("plain", text_1=TEXT, text_2=OTHER),
        one("plain, /v1/score", path="/v1/score", text_1=TEXT, text_2=OTHER),
        one("one to several", text_1=TEXT, text_2=[OTHER, TEXT]),
        one("several to several", text_1=[TEXT, OTHER], text_2=[OTHER, TEXT]),
        one("several to one", text_1=[TEXT, OTHER], text_2=TEXT),
        one("two to three", text_1=[TEXT, OTHER], text_2=[TEXT, OTHER, TEXT]),
        one("the same text twice", text_1=TEXT, text_2=[TEXT, TEXT]),
        one("nothing", text_1=TEXT, text_2=[]),
        one("empty", text_1="", text_2=""),
        one("text_2 missing", text_1=TEXT),
        one("queries and documents", queries=TEXT, documents=[OTHER, TEXT]),
        one("queries and items", queries=TEXT, items=[OTHER, TEXT]),
        one("data_1 and data_2", data_1=TEXT, data_2=[OTHER, TEXT]),
        one("use_activation false", text_1=TEXT, text_2=OTHER, use_activation=False),
        one("truncate_prompt_tokens", text_1=TEXT, text_2=OTHER, truncate_prompt_tokens=4),
        one("truncate_prompt_tokens beyond the context", text_1=TEXT, text_2=OTHER, truncate_prompt_tokens=5000),
        one("truncation_side left", text_1=TEXT, text_2=OTHER, truncate_prompt_tokens=4, truncation_side="left"),
        one("max_tokens_per_query", text_1=TEXT, text_2=OTHER, max_tokens_per_query=2),
        one("max_tokens_per_doc", text_1=TEXT, text_2=[OTHER, TEXT], max_tokens_per_doc=2),
        one("max_tokens_per_doc negative", text_1=TEXT, text_2=OTHER, max_tokens_per_doc=-1),
        one("max_tokens_per_doc beyond the context", text_1=TEXT, text_2=OTHER, max_tokens_per_doc=5000),
        one("instruction", text_1=TEXT, text_2=OTHER, instruction="Compare."),
        one("chat_template_kwargs", text_1=TEXT, text_2=OTHER, chat_template_kwargs={"a": 1}),
        one("parts", text_1=TEXT, text_2={"content": [{"type": "text", "text": OTHER}]}),
        one("too long", text_1=TEXT, text_2="add " * 5000),
        one("unknown parameter", text_1=TEXT, text_2=OTHER, mood="good"),
        ranked("plain"),
        ranked("plain, /v1/rerank", path="/v1/rerank"),
        ranked("plain, /v2/rerank", path="/v2/rerank"),
        ranked("top_n", top_n=1),
        ranked("top_n beyond", top_n=7),
        ranked("top_n 0", top_n=0),
        ranked("top_n negative", top_n=-1),
        ranked("return_documents", return_documents=True),
        ranked("one document", documents=OTHER),
        ranked("no documents", documents=[]),
        ranked("documents missing", documents=...),
        ranked("query missing", query=...),
        ranked("query empty", query=""),
        ranked("documents of texts", documents=[{"text": OTHER}, TEXT]),
        ranked("documents of parts", documents=[{"content": [{"type": "text", "text": OTHER}]}]),
        # Of the right, all three would be the query's first tokens, and rank by chance.
        ranked("truncation_side left", truncate_prompt_tokens=4, truncation_side="left"),
        ranked("max_tokens_per_doc", documents=[OTHER, TEXT], max_tokens_per_doc=2),
        ranked("use_activation false", use_activation=False),
    ]


TOKENS_CASES = [
    pooling("of each token", model="tokens"),
    pooling("of each token, several", model="tokens", input=[TEXT, OTHER]),
    pooling("of each token, base64", model="tokens", encoding_format="base64", embed_dtype="float16"),
    pooling("of each token, bytes", model="tokens", encoding_format="bytes", input=[TEXT, OTHER]),
    pooling("of each token, a chat", model="tokens", input=..., messages=TURNS),
    pooling("of each token, task embed", model="tokens", task="embed"),
    score("late interaction, plain", model="tokens", text_1=TEXT, text_2=OTHER),
    score("late interaction, one to several", model="tokens", text_1=TEXT, text_2=[OTHER, TEXT]),
    score("late interaction, several to several", model="tokens", text_1=[TEXT, OTHER], text_2=[OTHER, TEXT]),
    score("late interaction, max_tokens_per_doc", model="tokens", text_1=TEXT, text_2=OTHER, max_tokens_per_doc=2),
    ranking("late interaction, ranking", model="tokens"),
    ranking("late interaction, ranking, top_n", model="tokens", top_n=1),
]
SCORING_CASES = [
    *scoring_cases("vectors", "vectors"),
    *scoring_cases("ranks", "cross-encoder"),
    *scoring_cases("pairs", "BERT"),
]
CASES = [*EMBEDDING_CASES, *POOLING_CASES, *CLASSES_CASES, *TOKENS_CASES, *SCORING_CASES]
