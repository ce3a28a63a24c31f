"""The prompts whose answers a predictor learns from."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from mesh.errors import ConfigurationError
from services.frontend.text.model_text import ModelText

DEMO_TASKS = "demo-tasks"


def prompt_source(prompts: Path | None, hardest: int) -> str:
    """How a dataset names them."""
    if prompts is not None:
        return f"file {prompts.name}"
    return f"{DEMO_TASKS}: all kinds, difficulties 1 to {hardest}, calibration split"


def tokenised_prompts(
    text: ModelText, prompts: Path | None, hardest: int, count: int, seed: int
) -> Iterator[tuple[int, ...]]:
    """`count` prompts as token ids, fewer if the file has fewer. Raises ConfigurationError."""
    source = _demo_tasks(hardest, seed) if prompts is None else _of_file(prompts)
    for messages in islice(source, count):
        if isinstance(messages, str) or text.template is None:
            plain = messages if isinstance(messages, str) else "\n".join(message["content"] for message in messages)
            yield tuple(text.with_added_tokens(text.chunked.encode(plain)))
        else:
            yield tuple(text.chunked.encode(text.template.render(messages)))


def _demo_tasks(hardest: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Kind and difficulty uniform. The models were not trained on the calibration split, which is there for this."""
    from demo.tasks import stream

    for task in stream(seed, "calibration", difficulties=range(1, hardest + 1)):
        yield [{"role": "user", "content": task.prompt}]


def _of_file(path: Path) -> Iterator[str | list[dict[str, Any]]]:
    """JSON lines of {"messages": [...]} or {"prompt": "..."}."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = msgspec.json.decode(line)
            yield entry["prompt"] if "prompt" in entry else entry["messages"]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f'{path}, line {number}: expected {{"messages": [...]}} or {{"prompt": "..."}} ({error!r})'
            ) from error
