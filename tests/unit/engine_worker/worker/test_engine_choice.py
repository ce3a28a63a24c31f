import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_worker.engine_args import engine_settings
from engine_worker.engine_choice import make_engine
from engine_worker.settings import WorkerSettings
from engine_worker.vocabulary import Vocabulary, read_vocabulary
from mesh.errors import ConfigurationError
from mesh.runtime import SystemClock


@dataclass(frozen=True, slots=True)
class Inner:
    rate: float = 1.0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    path: str
    inner: Inner = field(default_factory=Inner)
    eager: bool | None = None


def test_options_come_on_top_of_defaults() -> None:
    options = ("inner.rate=2.5", "eager=true", "inner.count=3")
    assert engine_settings(Outer, options, {"path": "p", "inner": {"rate": 7.0}}) == Outer("p", Inner(2.5, 3), True)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("inner.rate", "not of the form NAME=VALUE"),
        ("=3", "not of the form NAME=VALUE"),
        ("speed=3", "'speed' is not a setting here; there are path, inner.*, eager"),
        ("inner=3", "'inner' is not a setting here"),
        ("path.x=3", "'path' is not a setting here"),
        ("inner.speed=3", "'speed' is not a setting here; there are rate, count"),
        ("inner.count=many", "int"),
    ],
)
def test_wrong_options_are_refused_by_name(option: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        engine_settings(Outer, (option,), {"path": "p"})
    assert reason in str(caught.value)


def test_what_the_settings_do_not_know_is_kept_where_they_have_room_for_it() -> None:
    @dataclass(frozen=True, slots=True)
    class Open:
        known: int = 0
        rest: tuple[str, ...] = ()

    given = ("--kv-cache-dtype=fp8", "known=2", "lora.path-a=x=y", "rest=z")
    expected = Open(2, ("kv_cache_dtype=fp8", "lora.path_a=x=y", "rest=z"))
    assert engine_settings(Open, given, {}, others="rest") == expected


def write_model(path: Path, tokenizer: Any, generation: Any) -> Path:
    (path / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    (path / "generation_config.json").write_bytes(msgspec.json.encode(generation))
    return path


def test_ordinary_tokens_lie_between_special_ones(tmp_path: Path) -> None:
    tokenizer = {
        "model": {"vocab": {f"t{number}": number for number in range(10)}},
        "added_tokens": [{"id": 0}, {"id": 4}, {"id": 11}],
    }
    model = write_model(tmp_path, tokenizer, {"eos_token_id": [9, 11]})
    assert read_vocabulary(model) == Vocabulary(12, first_token_id=5, last_token_id=8, eos_token_id=9)


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    model = write_model(tmp_path, {"model": {"vocab": [["a", 0.0]] * 5}, "added_tokens": []}, {"eos_token_id": 0})
    assert read_vocabulary(model) == Vocabulary(5, 1, 4, 0)


def test_answers_are_made_of_words_where_there_are_enough(tmp_path: Path) -> None:
    texts = [
        "</s>",
        *(f"Ġword{letter}" for letter in "abcdefghijklmnopqrst"),
        "Ġno",
        "Ġ9",
        "Ġ\u00c3",
        "plain",
        "Ġ</tool",
    ]
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 0}, {"id": 5, "content": "Ġworde"}]}
    found = read_vocabulary(write_model(tmp_path, tokenizer, {"eos_token_id": 0}))
    assert found is not None
    assert found.word_token_ids == (1, 2, 3, 4, *range(6, 21)), "special tokens are not spoken"
    few = {"model": {"vocab": {"a": 0, "Ġword": 1, "▁other": 2}}, "added_tokens": [{"id": 0}]}
    (tmp_path / "few").mkdir()
    found = read_vocabulary(write_model(tmp_path / "few", few, {"eos_token_id": 0}))
    assert found is not None
    assert found.word_token_ids == ()


def test_a_directory_without_tokenizer_has_no_vocabulary(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None


@pytest.mark.parametrize("tokenizer", [{}, [], {"model": {"vocab": {}}, "added_tokens": []}])
def test_a_broken_tokenizer_is_told(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_vocabulary(write_model(tmp_path, tokenizer, {"eos_token_id": 0}))


@pytest.mark.live
async def test_the_simulated_engine_says_of_itself_what_it_is_told(tmp_path: Path) -> None:
    options = ("tensor_parallel_size=4", "pipeline_parallel_size=2")
    engine = make_engine(WorkerSettings("m", str(tmp_path), engine="simulated", engine_arg=options), 0, SystemClock())
    limits = await engine.start()
    await engine.stop()
    assert (limits.tensor_parallel, limits.pipeline_parallel) == (4, 2)
    with pytest.raises(ConfigurationError, match="at least 1"):
        make_engine(
            WorkerSettings("m", str(tmp_path), engine="simulated", engine_arg=("tensor_parallel_size=0",)),
            0,
            SystemClock(),
        )


@pytest.mark.process
def test_the_simulated_engine_imports_neither_torch_nor_vllm() -> None:
    script = """
import sys
from engine_worker.engine_choice import make_engine
from mesh.runtime import SystemClock
from engine_worker.role import WorkerRole
from engine_worker.settings import WorkerSettings
settings = WorkerSettings(model="m", model_path="demo/models/demo-small", engine="simulated",
                          engine_arg=("instance.kv_blocks=600", "time_scale=0.5"))
engine = make_engine(settings, 0, SystemClock())
output = engine.instance.config.output
assert engine.instance.config.kv_blocks == 600
assert (output.vocabulary_tokens, output.first_token_id, output.eos_token_id) == (640, 6, 2), output
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "vllm", "transformers")])
"""
    root = Path(__file__).resolve().parents[4]
    result = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
