"""Models without a `tokenizer.json`: what is made of vLLM's tokenizer reads and writes as that does, and is served."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.tokenizers import get_tokenizer

from engine_worker.engines.vllm import tokenizer_files
from engine_worker.engines.vllm.tokenizer_files import made_text_files
from mesh.errors import ConfigurationError
from mesh.text_files import TEKKEN, TextFiles, read_text_files
from services.frontend.text.model_text import ModelText
from tests.mesh.running_mesh import RunningMesh
from tests.vllm.other_tokenizers import CONTROL, DEMO, make_tekken, make_tiktoken

pytestmark = pytest.mark.vllm

START_S = 600.0
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "mistral": (make_tekken, "mistral"),
    "tekken": (make_tekken, "hf"),
    "tiktoken": (make_tiktoken, "hf"),
}
WORDS = (
    "the ",
    "quick",
    " 1234",
    "don't",
    "\n\n",
    "  ",
    "Größe",
    "你好",
    "[INST]",
    "</s>",
    "[BOS]",
    "<think>",
    "/\r\n",
)
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=40).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@cache
def loaded(folder: Path, kind: str) -> tuple[Any, TextFiles, ModelText]:
    """vLLM's tokenizer, the files of a frontend, and what that reads with them."""
    make, mode = KINDS[kind]
    path = folder / make.__name__
    if not path.exists():
        make(path)
    tokenizer = get_tokenizer(str(path), tokenizer_mode=mode, trust_remote_code=True)
    read = read_text_files(path)
    files = {**read, **made_text_files(tokenizer, read)}
    if mode == "mistral":
        files[TEKKEN] = (path / TEKKEN).read_bytes()  # which a worker puts beside it
    return tokenizer, files, ModelText.from_files(files, kind, lambda: 0.0)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_a_text_has_the_tokens_that_vllm_makes_of_it(folder: Path, kind: str, text: str) -> None:
    tokenizer, _, made = loaded(folder, kind)
    token_ids = made.chunked.encode(text)
    assert token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert made.with_added_tokens(token_ids) == tokenizer.encode(text, add_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@given(token_ids=st.lists(st.integers(32, 633), max_size=30))
def test_tokens_are_the_text_that_vllm_makes_of_them(folder: Path, kind: str, token_ids: list[int]) -> None:
    tokenizer, _, made = loaded(folder, kind)
    written = made.detokenizer(())
    text = written.push(token_ids) + written.finish()
    # A part of a character at the end is never streamed, by vLLM neither.
    assert text.rstrip("\ufffd") == tokenizer.decode(token_ids, skip_special_tokens=True).rstrip("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_says_what_the_checkpoint_does(folder: Path, kind: str) -> None:
    tokenizer, files, made = loaded(folder, kind)
    assert made.vocabulary_size == 634 + 32
    assert tokenizer.eos_token_id is None or tokenizer.eos_token_id in made.eos_token_ids
    assert (made.template is not None) == (kind == "tiktoken")
    assert b"auto_map" not in files["tokenizer_config.json"], "a frontend has none of that code"


def test_mistrals_library_takes_no_token_out_of_a_text_and_shows_few(folder: Path) -> None:
    tokenizer, _, made = loaded(folder, "mistral")
    call = [CONTROL.index("[TOOL_CALLS]"), CONTROL.index("[PREFIX]"), *tokenizer.encode("x", add_special_tokens=False)]
    for skips in (True, False):
        assert made.detokenizer((), skip_special_tokens=skips).push(call) == "[TOOL_CALLS]x"
    assert len(made.encode("[TOOL_CALLS]")) > 1


def test_a_tokenizer_that_is_read_otherwise_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _, _ = loaded(folder, "tiktoken")
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, **_: [*self.model.encode(text[::-1])])
    with pytest.raises(ConfigurationError, match=r"has no tokenizer.json, and none can be made .*: written as a"):
        made_text_files(tokenizer, {})


def test_a_tokenizer_of_no_known_kind_is_refused() -> None:
    class Letters:
        def encode(self, text: str, **_: object) -> list[int]:
            return [*text.encode()]

    with pytest.raises(ConfigurationError, match=r"vLLM's Letters: it is neither of .* nor of tiktoken; save one"):
        made_text_files(Letters(), {})


def test_samples_tell_tokenizers_apart(folder: Path) -> None:
    """Two that differ in the digits of a word, and in nothing else that they are made of."""
    one, other = (loaded(folder, kind)[0] for kind in ("tekken", "tiktoken"))
    assert any(one.encode(sample) != other.encode(sample) for sample in tokenizer_files._SAMPLES)


@pytest.mark.process
def test_a_model_with_mistrals_files_alone_is_served(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_tekken(path)
    arguments = ("dtype=float32", "tokenizer_mode=mistral")
    mesh = RunningMesh(
        tmp_path,
        *("--model", f"tekken={path}:1", "--tool-call-parser", "mistral", "--ready-timeout-s", str(START_S)),
        *(each for argument in arguments for each in ("--engine-arg", argument)),
    )
    asked: Any = {"model": "tekken", "messages": [{"role": "user", "content": "[INST] hi"}], "max_tokens": 20}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    try:
        mesh.wait_until_serving(START_S)
        tokenizer = get_tokenizer(str(path), tokenizer_mode="mistral")
        with httpx.Client(base_url=mesh.url, timeout=120) as http:
            plain, called = (
                http.post("/v1/chat/completions", json={**asked, "return_token_ids": True, **tools}).json()
                for tools in ({}, {"tools": [tool]})
            )
        begin, shown = (CONTROL.index(name) for name in ("[INST]", "[AVAILABLE_TOOLS]"))
        assert plain["prompt_token_ids"] == tokenizer.apply_chat_template(asked["messages"])
        assert plain["prompt_token_ids"].count(begin) == 1, "what a client writes begins no turn"
        assert shown in called["prompt_token_ids"]
        assert called["choices"][0]["message"]["content"]
    finally:
        mesh.cut()


def test_the_demo_models_own_file_is_as_good_as_one_that_is_made() -> None:
    """Of a checkpoint that has a tokenizer.json nothing is made; if it were, it would be the same."""
    tokenizer, read = get_tokenizer(str(DEMO)), read_text_files(DEMO)
    own, made = (
        ModelText.from_files(files, "demo", lambda: 0.0)
        for files in (read, {**read, **made_text_files(tokenizer, read)})
    )
    text = "".join(WORDS)
    assert own.encode(text) == made.encode(text)
    assert own.with_added_tokens([5]) == made.with_added_tokens([5])
