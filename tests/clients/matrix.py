"""Runs every client against an endpoint and prints which of its checks pass:

    python -m tests.clients.matrix --url http://127.0.0.1:8000 --write docs/clients.md

The clients' libraries are in an environment of their own, which scripts/install_clients.sh makes.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CACHE = ROOT / ".clients"
CLIENTS = (
    "openai",
    "openai (Node)",
    "langchain-openai",
    "litellm",
    "instructor",
    "pydantic-ai",
    "anthropic",
    "guidellm",
    "lm-eval",
    "vllm bench serve",
)
BEGIN, END = "<!-- printed by tests/clients/matrix.py -->", "<!-- end -->"
CHECK_TIMEOUT_S = 900.0


class Outcome(msgspec.Struct):
    """Of one check."""

    client: str
    check: str
    failure: str
    """Empty: it passed."""
    seconds: float


@dataclass(frozen=True)
class Endpoint:
    """What is asked."""

    url: str
    model: str
    embedding_model: str
    tokenizer: Path


def run_client(client: str, endpoint: Endpoint, python: str | None = None) -> list[Outcome]:
    """All checks of one client, in its environment. One that cannot be started fails as a whole."""
    environment = {**os.environ, "CLIENTS_TOKENIZER": str(endpoint.tokenizer), "CLIENTS_NODE": str(CACHE)}
    environment.pop("PYTHONPATH", None)
    arguments = (endpoint.url, endpoint.model, endpoint.embedding_model)
    if client == "openai (Node)":
        command: tuple[str, ...] = ("node", str(HERE / "checks.mjs"), *arguments)
    else:
        command = (python or _python(client), str(HERE / "checks.py"), client, *arguments)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Outcome(client, "all", str(error)[:300], 0.0)]
    found = [
        msgspec.json.decode(line, type=Outcome) for line in done.stdout.splitlines() if line.startswith('{"client"')
    ]
    return found or [Outcome(client, "all", (done.stderr or done.stdout).strip().splitlines()[-1][:300], 0.0)]


def _python(client: str) -> str:
    """vLLM's own is where vLLM is."""
    return sys.executable if client == "vllm bench serve" else str(CACHE / "bin" / "python")


def table(outcomes: Sequence[Outcome]) -> str:
    """As Markdown."""
    lines = ["| client | check | result |", "|---|---|---|"]
    for each in outcomes:
        failure = each.failure.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {each.client} | {each.check} | {'passes' if not each.failure else 'fails: ' + failure} |")
    passed = sum(not each.failure for each in outcomes)
    return "\n".join((f"{passed} of {len(outcomes)} pass.", "", *lines))


def written_into(page: str, printed: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with what is between the two marks replaced."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{printed}\n\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo-large")
    parser.add_argument("--embedding-model", default="vectors")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "demo" / "models" / "demo-large")
    parser.add_argument("--client", action="append", choices=CLIENTS, help="only this one; repeatable")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    parser.add_argument("--outcomes", action="append", type=Path, default=[], help="print what --json printed before")
    options = parser.parse_args()
    endpoint = Endpoint(options.url, options.model, options.embedding_model, options.tokenizer)
    outcomes: list[Outcome] = []
    for file in options.outcomes:
        outcomes += msgspec.json.decode(file.read_bytes(), type=list[Outcome])
    for client in options.client or (() if options.outcomes else CLIENTS):
        outcomes += run_client(client, endpoint)
        print(f"{client}: done", file=sys.stderr)
    printed = table(outcomes)
    print(json.dumps([msgspec.to_builtins(each) for each in outcomes]) if options.json else printed)
    if options.write is not None:
        options.write.write_text(written_into(options.write.read_text(), printed))
    return 1 if any(each.failure for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
