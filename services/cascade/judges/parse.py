"""Judges by the names that operators use."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from mesh.errors import ConfigurationError
from mesh.plugins import PluginRegistry
from services.cascade.judges.chat import Ask, ChatJudge, grading, preferring, split_options
from services.cascade.judges.confidence import ConfidenceJudge
from services.cascade.judges.exact import ExactJudge
from services.cascade.judges.interface import Judge, JudgeContext, JudgeFactory
from services.cascade.judges.verdict import rubric_digest


def make_judge(text: str, context: JudgeContext) -> Judge:
    """The judge that `text`, NAME or NAME:ARGUMENT, chooses. Raises `ConfigurationError`."""
    name, _, argument = text.partition(":")
    factory = JUDGES.get(name)
    judge = factory.make(argument, context)
    if judge.name != text:  # metrics and records tell judges apart by their names
        raise ConfigurationError(f"the judge {text!r} would be called {judge.name!r}; write {factory.form}")
    return judge


PREFERENCE: Final = "preference"


def compares(text: str) -> bool:
    """Whether the judge compares two answers, and so labels samples and judges nothing else."""
    return text.partition(":")[0] == PREFERENCE


def with_rubric(text: str, rubric: str) -> str:
    """The judge's name with the digest of the rubric that it is to judge by; the same for one that takes none."""
    if not rubric or text.partition(":")[0] not in ("model", "endpoint", PREFERENCE) or "rubric=" in text:
        return text
    return f"{text}{'&' if '?' in text else '?'}rubric={rubric_digest(rubric)}"


def _model(argument: str, context: JudgeContext) -> Judge:
    return _chat(f"model:{argument}", context)


def _endpoint(argument: str, context: JudgeContext) -> Judge:
    return _chat(f"endpoint:{argument}", context)


def _preference(argument: str, context: JudgeContext) -> Judge:
    if argument.partition(":")[0] not in ("model", "endpoint"):
        raise ConfigurationError(
            f"the judge 'preference:{argument}' asks nobody; write preference:model:NAME or "
            "preference:endpoint:MODEL@URL"
        )
    return _chat(argument, context, f"{PREFERENCE}:{argument}", preferring)


def _chat(text: str, context: JudgeContext, name: str = "", ask: Ask = grading) -> ChatJudge:
    """From model:NAME or endpoint:MODEL@URL, with options behind a question mark."""
    kind, _, argument = text.partition(":")
    rest, options = split_options(argument)
    model, at, url = rest.partition("@") if kind == "endpoint" else (rest, "", "")
    if kind == "model" and not model:
        raise ConfigurationError("the judge 'model' needs a model of this mesh; write model:NAME")
    if kind == "endpoint" and (not model or not at or urlsplit(url).scheme not in ("http", "https")):
        raise ConfigurationError(f"the judge 'endpoint:{argument}' names no model and URL; write endpoint:MODEL@URL")
    base = url.rstrip("/")
    return ChatJudge(
        name or text,
        model,
        context.find_frontend if kind == "model" else lambda: base,
        context.deadline_s,
        context.mesh_key if kind == "model" else context.api_key,
        context.http,
        options,
        context.rubric,
        ask,
    )


OWN_JUDGES: Final[Mapping[str, JudgeFactory]] = MappingProxyType(
    {
        "confidence": JudgeFactory(lambda _argument, _context: ConfidenceJudge(), "confidence"),
        "exact": JudgeFactory(lambda _argument, _context: ExactJudge(), "exact"),
        "model": JudgeFactory(_model, "model:NAME"),
        "endpoint": JudgeFactory(_endpoint, "endpoint:MODEL@URL"),
        PREFERENCE: JudgeFactory(_preference, "preference:model:NAME"),
    }
)
JUDGES: Final = PluginRegistry("penstock.judges", "judge", JudgeFactory, OWN_JUDGES)
"""Penstock's own judges and those of installed packages."""
