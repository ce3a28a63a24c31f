"""How long does a newcomer wait, from the clone to the first answer? Tried.

    python3 scripts/newcomer.py                        # what README.md says: make up, with vLLM
    python3 scripts/newcomer.py --engine simulated     # the way without weights and torch
    python3 scripts/newcomer.py --no-pip-cache         # as where nothing was ever installed
    python3 scripts/newcomer.py --from https://github.com/OWNER/penstock

Clones into a folder of its own, sets up, brings a mesh up, asks what README.md asks, stops the mesh and deletes the
folder. `make up` is timed in its two halves: `make install`, and what is left of it. Needs nothing but Python, git and
make; the clone is of this checkout's last commit unless `--from` says otherwise.

Exit status: 0 answered, 1 something failed, whose last lines are shown.
"""

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SET_UP_S = 3600.0
SERVING_S = 600.0
ANSWER_S = 120.0
STOP_S = 60.0
POLL_S = 0.05
SHOWN_LINES = 20
QUESTION = "Count from 7 up to 12."
_SERVING = re.compile(r"^serving at (http://\S+?),? ", re.MULTILINE)
_MODEL = re.compile(r'"model": "([^"]+)"')


class Failed(Exception):
    """A step that a newcomer would have been stuck at."""


@dataclass(frozen=True)
class Step:
    """One of the newcomer's commands, and how long it took."""

    name: str
    seconds: float


class Newcomer:
    """Does what README.md says, in a folder of its own."""

    def __init__(self, folder: Path, engine: str, environment: Mapping[str, str]) -> None:
        self.clone = folder / "penstock"
        self.steps: list[Step] = []
        self._engine = engine
        self._log = folder / "log"
        # A mesh that runs here already has the same name, and this environment is not the newcomer's.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        kept = {name: value for name, value in kept.items() if not name.startswith(("PENSTOCK_", "MAKE", "MFLAGS"))}
        self._environment = {**kept, "XDG_RUNTIME_DIR": str(folder), **environment}

    def come(self, source: str) -> str:
        """From the clone to the first answer, which is returned. Raises Failed."""
        with self._timed(f"git clone {source}"):
            self._do("git", "clone", "--quiet", source, str(self.clone), within_s=SET_UP_S)
        target = "install" if self._engine == "vllm" else "package"
        with self._timed(f"make {target}"):
            self._do("make", target, within_s=SET_UP_S, cwd=self.clone)
        arguments = f"--port {_free_port()}" + ("" if self._engine == "vllm" else f" --engine {self._engine}")
        command = ["make", "up", f"ARGS={arguments}"]
        if self._engine != "vllm":  # `make up` would install vLLM
            command = [".venv/bin/penstock", "up", *arguments.split()]
        with self._log.open("ab") as log:
            mesh = subprocess.Popen(
                command, cwd=self.clone, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            with self._timed(" ".join(command)):
                url, model = self._serving(mesh)
            with self._timed("the first answer"):
                return _ask(url, model)
        finally:
            self._stop(mesh)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        print(f"{name} ...", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        yield
        self.steps.append(Step(name, round(time.monotonic() - began_s, 1)))

    def _do(self, *command: str, within_s: float, cwd: Path | None = None) -> None:
        with self._log.open("ab") as log:
            try:
                status = subprocess.run(
                    command, cwd=cwd, env=self._environment, stdout=log, stderr=log, timeout=within_s, check=False
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Failed(str(error)) from None
        if status:
            raise Failed(f"{' '.join(command)} ended with {status}:\n{self._last_lines()}")

    def _serving(self, mesh: "subprocess.Popen[bytes]") -> tuple[str, str]:
        """The address and the model that the mesh says."""
        give_up_s = time.monotonic() + SERVING_S
        while time.monotonic() < give_up_s:
            said = self._log.read_text(errors="replace")
            found = _SERVING.search(said)
            if found is not None and (model := _MODEL.search(said, found.end())) is not None:
                return found[1], model[1]
            if mesh.poll() is not None:
                raise Failed(f"the mesh ended with {mesh.returncode}:\n{self._last_lines()}")
            time.sleep(POLL_S)
        raise Failed(f"the mesh did not serve within {SERVING_S:g} s:\n{self._last_lines()}")

    def _stop(self, mesh: "subprocess.Popen[bytes]") -> None:
        if mesh.poll() is not None:
            return
        os.killpg(mesh.pid, signal.SIGINT)  # Ctrl-C in a terminal reaches make and what it runs
        try:
            mesh.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(mesh.pid, signal.SIGKILL)
            raise Failed(f"the mesh did not stop within {STOP_S:g} s of Ctrl-C") from None

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ask(url: str, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            text: str = json.load(answer)["choices"][0]["message"]["content"]
    except OSError as error:
        raise Failed(f"no answer from {url}: {error}") from None
    if not text:
        raise Failed("the answer was empty")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--from", dest="source", default=str(ROOT), help="What to clone; default: this checkout.")
    parser.add_argument("--no-pip-cache", action="store_true", help="Have pip fetch everything anew.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    asked = parser.parse_args(arguments)
    environment = {"PIP_NO_CACHE_DIR": "1"} if asked.no_pip_cache else {}
    # In a shell's background it is ignored, and what is started would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="penstock-newcomer-") as folder:
        newcomer = Newcomer(Path(folder), asked.engine, environment)
        try:
            answer = newcomer.come(asked.source)
        except Failed as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    total_s = round(sum(step.seconds for step in newcomer.steps), 1)
    if asked.json:
        steps = [asdict(step) for step in newcomer.steps]
        print(json.dumps({"steps": steps, "total_s": total_s, "answer": answer}, indent=2))
        return 0
    for step in newcomer.steps:
        print(f"{step.seconds:8.1f} s  {step.name}")
    print(f"{total_s:8.1f} s  from the clone to the first answer: {answer!r}")
    cache = "without pip's cache" if asked.no_pip_cache else "with what pip had in its cache"
    print(f"            {os.cpu_count()} cores, Python {platform.python_version()}, {cache}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
