"""Judges by the names that operators use."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from mesh.errors import ConfigurationError
from mesh.plugins import PluginRegistry
from services.cascade.judges.chat import ChatJudge
from services.cascade.judges.confidence import ConfidenceJudge
from services.cascade.judges.exact import ExactJudge
from services.cascade.judges.interface import Judge, JudgeContext, JudgeFactory


def make_judge(text: str, context: JudgeContext) -> Judge:
    """The judge that `text`, NAME or NAME:ARGUMENT, chooses. Raises `ConfigurationError`."""
    name, _, argument = text.partition(":")
    factory = JUDGES.get(name)
    judge = factory.make(argument, context)
    if judge.name != text:  # metrics and records tell judges apart by their names
        raise ConfigurationError(f"the judge {text!r} would be called {judge.name!r}; write {factory.form}")
    return judge


def _model(argument: str, context: JudgeContext) -> Judge:
    if not argument:
        raise ConfigurationError("the judge 'model' needs a model of this mesh; write model:NAME")
    return ChatJudge(
        f"model:{argument}", argument, context.find_frontend, context.deadline_s, context.mesh_key, context.http
    )


def _endpoint(argument: str, context: JudgeContext) -> Judge:
    model, _, url = argument.partition("@")
    if not model or urlsplit(url).scheme not in ("http", "https"):
        raise ConfigurationError(f"the judge 'endpoint:{argument}' names no model and URL; write endpoint:MODEL@URL")
    base = url.rstrip("/")
    return ChatJudge(f"endpoint:{argument}", model, lambda: base, context.deadline_s, context.api_key, context.http)


OWN_JUDGES: Final[Mapping[str, JudgeFactory]] = MappingProxyType(
    {
        "confidence": JudgeFactory(lambda _argument, _context: ConfidenceJudge(), "confidence"),
        "exact": JudgeFactory(lambda _argument, _context: ExactJudge(), "exact"),
        "model": JudgeFactory(_model, "model:NAME"),
        "endpoint": JudgeFactory(_endpoint, "endpoint:MODEL@URL"),
    }
)
JUDGES: Final = PluginRegistry("penstock.judges", "judge", JudgeFactory, OWN_JUDGES)
"""Penstock's own judges and those of installed packages."""
