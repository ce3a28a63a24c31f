"""Whether vLLM has a parser of a name: known when a worker starts, rather than when a frontend first needs it."""

import logging
from importlib.util import find_spec
from typing import Final

from mesh.errors import ConfigurationError

log = logging.getLogger(__name__)

FRONTENDS_TOOL_PARSERS: Final = ("hermes", "llama3_json", "llama4_json", "qwen3_coder", "qwen3_xml")
FRONTENDS_REASONING_PARSERS: Final = ("deepseek_r1", "qwen3")
"""Those that frontends have themselves."""


def check_parser_names(tool_parser: str, reasoning_parser: str) -> None:
    """Blocks: where a name is not among the frontends' own, vLLM is imported. Raises ConfigurationError with all names
    that there are."""
    tools_own = not tool_parser or tool_parser in FRONTENDS_TOOL_PARSERS
    if tools_own and (not reasoning_parser or reasoning_parser in FRONTENDS_REASONING_PARSERS):
        return
    if find_spec("vllm") is None:
        log.warning("vLLM is not installed here: frontends find out whether it has these parsers")
        return
    import vllm
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for option, name, manager in (
        ("tool-call-parser", tool_parser, ToolParserManager),
        ("reasoning-parser", reasoning_parser, ReasoningParserManager),
    ):
        known = sorted(manager.list_registered())
        if name and name not in known:
            raise ConfigurationError(
                f"--{option} {name}: vLLM {vllm.__version__} has none of that name but {', '.join(known)}"
            )
