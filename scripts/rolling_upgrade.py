"""Do processes of a former commit and of this checkout serve one mesh together? Tried.

    python scripts/rolling_upgrade.py COMMIT [--engine vllm]

The code of COMMIT runs from a copy of its tree, with the packages that are installed here: what an upgrade changes is
our code, and building wheels would need a network. First the mesh is of the former release and a frontend, a scheduler,
a monitor and a worker of this one join it; then the other way round. Each time

- streams through either frontend are answered by both workers, whole;
- running requests move between the workers, either way;
- with simulated engines, a cascade router joins too: a cascade of two models is answered through either frontend, which
  ask both routers in turn, and again while the first one is killed (kill -9);
- a worker is killed under streams, and each of these ends whole at the other one.

Processes have identities, unless one of the releases knows of none.

Exit status: 0 all of it did, 1 something did not.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
MODEL = "demo-large"
SMALL = "demo-small"
CASCADE = "both"
FIRST = f"{MODEL}-0"
JOINED = f"{MODEL}-joined"
ANSWER_TOKENS = 600
STREAMS = 8
WAIT_S = 300.0
"""vLLM's workers take long to start where several do."""
TRIES = 5
PACE = ("--engine-arg", "time_scale=2")
"""Slow enough that a stream lasts while a command starts."""
POLL_S = 0.1


class Failed(Exception):
    """What was expected and did not come."""


@dataclass
class Answer:
    """One streamed answer, as far as it has come."""

    instance: str = ""
    request_id: str = ""
    tokens: int = 0
    finish: str = ""
    failure: str = ""
    is_done: bool = False
    chunks: int = 0


@dataclass
class Release:
    """The code of one release, run with the installed packages."""

    name: str
    tree: Path
    run_dir: Path
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """In which its processes and commands find its code and the mesh."""
        path = f"{self.tree}{os.pathsep}{self.tree / 'generated'}"
        kept = {name: value for name, value in os.environ.items() if name != "PENSTOCK_STORE"}
        return {**kept, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(self.run_dir)}

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """A `penstock` command that goes on; its output goes to a file of the run."""
        log = self.run_dir / f"{self.name}-{'-'.join(arguments[:2])}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                self._command(arguments), cwd=self.tree, env=self.environment(), stdout=output, stderr=output
            )
        self.processes.append(process)
        return process

    def ask(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """A `penstock` command to its end."""
        command = self._command(arguments)
        return subprocess.run(
            command,
            cwd=self.tree,  # `python -m` looks there first
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def kill(self, role: str) -> None:
        """kill -9 of the process of a role that `penstock up` has started."""
        (up, *_) = self.processes
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                words = (path / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == up.pid and "serve" in words and words[words.index("serve") + 1] == role:
                os.kill(int(path.name), signal.SIGKILL)
                return
        raise Failed(f"`penstock up` runs no {role}")

    def knows_identities(self) -> bool:
        """Whether its processes can ask each other who they are, which they do by default."""
        return "--insecure" in self.ask("up", "--help").stdout

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "services.cli.main", *arguments]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Have old and new processes serve one mesh.")
    parser.add_argument("commit", help="the former release, by anything that git understands")
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated", help="of every worker")
    arguments = parser.parse_args()
    commit = arguments.commit
    failures = 0
    for direction in ("the mesh is old, new ones join", "the mesh is new, old ones join"):
        print(direction, flush=True)
        with tempfile.TemporaryDirectory(prefix="penstock-upgrade-") as folder:
            old = Release("old", _tree_of(commit, Path(folder)), Path(folder))
            new = Release("new", ROOT, Path(folder))
            first, joining = (old, new) if direction.startswith("the mesh is old") else (new, old)
            try:
                _serve_together(first, joining, arguments.engine)
            except (Failed, httpx.HTTPError, subprocess.TimeoutExpired) as error:
                failures += 1
                print(f"  FAILED: {error}", flush=True)
                for log in sorted(Path(folder).glob("*.log")):
                    print(f"  {log.name}: {log.read_text()[-1500:]}")
            finally:
                _end(first.processes + joining.processes)
    return 1 if failures else 0


def _tree_of(commit: str, folder: Path) -> Path:
    """The commit's files, with its stubs."""
    tree = folder / "former"
    tree.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(tree)], input=archive.stdout, check=True)
    subprocess.run([sys.executable, str(tree / "scripts" / "generate_protos.py")], check=True, capture_output=True)
    return tree


def _serve_together(first: Release, joining: Release, engine: str) -> None:
    ports = [_free_port(), _free_port()]
    is_simulated = engine == "simulated"
    engine_options = (*(PACE if is_simulated else ()), "--engine", engine)
    models = ("--model", MODEL, *(("--model", SMALL) if is_simulated else ()))
    options = [*engine_options, *models, "--workers", "1", "--port", str(ports[0]), "--policy", "round_robin"]
    if first.knows_identities() and not joining.knows_identities():
        options.append("--insecure")
    first.start("up", *options)
    is_named = first.knows_identities() and joining.knows_identities()
    print(f"  processes have {'identities' if is_named else 'no identities'}", flush=True)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    _eventually(lambda: _is_healthy(urls[0]), "the first mesh serves")
    model_path = str(first.tree / "demo" / "models" / MODEL)
    worker_options = (*engine_options, "--model", MODEL, "--model-path", model_path)
    instances = 3 if is_simulated else 2
    joining.start("serve", "monitor", "--member-id", "monitor-joined")
    joining.start("serve", "scheduler", "--member-id", "scheduler-joined")
    if is_simulated:
        joining.start("serve", "cascade", "--member-id", "cascade-joined")
    worker = joining.start("serve", "worker", "--member-id", JOINED, *worker_options)
    joining.start("serve", "frontend", "--member-id", "frontend-joined", "--http-port", str(ports[1]))
    _eventually(lambda: all(map(_is_healthy, urls)), "both frontends serve")
    _eventually(lambda: _ready(first) == instances == _ready(joining), "status of either release knows all workers")
    for url, release in zip(urls, (first, joining), strict=True):
        with _streams(url) as answers:
            pass
        _check_whole(answers)
        if {answer.instance for answer in answers} != {FIRST, JOINED}:
            raise Failed(f"only {sorted({answer.instance for answer in answers})} answered")
        print(
            f"  {len(answers)} streams through the frontend of the {release.name} release: whole, by both workers",
            flush=True,
        )
    if is_simulated:
        _cascade(first, joining, urls)
    for url, release, source in zip(urls, (joining, first), (FIRST, JOINED), strict=True):
        print(f"  {_move(url, release, source)}", flush=True)
    for url in urls:
        with _streams(url) as answers:
            _eventually(lambda: all(answer.chunks > 2 for answer in answers), "every stream has begun")
            at_joined = [answer for answer in answers if answer.instance == JOINED]
            worker.send_signal(signal.SIGKILL)
        _check_whole(answers)
        if not at_joined:
            raise Failed("no stream was at the worker that was killed")
        print(
            f"  {len(at_joined)} of {len(answers)} streams lost their worker of the {joining.name} release: all whole"
        )
        worker = joining.start("serve", "worker", "--member-id", JOINED, *worker_options)
        _eventually(lambda: _ready(first) == instances == _ready(joining), "the worker is back")


def _cascade(first: Release, joining: Release, urls: Sequence[str]) -> None:
    """Answered through either frontend, by the routers of both releases in turn, and by one while the other is dead."""
    tiers = ("--tier", SMALL, "--tier", MODEL)
    made = joining.ask("cascade", "set", CASCADE, *tiers, "--threshold", "50")
    if made.returncode != 0:
        raise Failed(f"no cascade: {made.stderr}")
    _eventually(lambda: all(_lists(url, CASCADE) for url in urls), "both frontends list the cascade")
    for url, release in zip(urls, (first, joining), strict=True):
        with _streams(url, model=CASCADE) as answers:
            pass
        _check_whole(answers)
        print(f"  {len(answers)} streams of a cascade through the frontend of the {release.name} release: whole")
    for url in urls:
        with _streams(url, model=CASCADE) as answers:
            first.kill("cascade")
        _check_whole(answers)
        _eventually(lambda: _ready(first) > 0, "the router is back")
    print(f"  {2 * STREAMS} such streams whose router of the {first.name} release was killed: whole", flush=True)


def _lists(url: str, model: str) -> bool:
    try:
        return model in {each["id"] for each in httpx.get(f"{url}/v1/models", timeout=5).json()["data"]}
    except httpx.HTTPError:
        return False


def _move(url: str, release: Release, source: str) -> str:
    """A running request away from `source`, by the `penstock migrate` of `release`. Which stream runs there is for the
    policy, and a stream may end before the command has begun: several are tried."""
    target = JOINED if source == FIRST else FIRST
    for _ in range(TRIES):
        with _streams(url, 2) as answers:
            _eventually(lambda: all(answer.chunks > 2 for answer in answers), "the streams have begun")
            here = [answer for answer in answers if answer.instance == source]
            moved = here and release.ask("migrate", here[0].request_id, "--to", target, "--json")
        _check_whole(answers)
        if moved and moved.returncode == 0:
            return f"a running request moved from {source} to {target} by the {release.name} release's command: whole"
        if moved and "it may have ended" not in moved.stderr:
            raise Failed(f"no migration to {target}: {moved.stdout} {moved.stderr}")
    raise Failed(f"no stream at {source} lived long enough to be moved")


@contextmanager
def _streams(url: str, count: int = STREAMS, model: str = MODEL) -> Iterator[list[Answer]]:
    """Runs streams; waits for their ends when left."""
    answers = [Answer() for _ in range(count)]
    readers = [
        threading.Thread(target=_read, args=(url, model, f"{number} tell me", answer), daemon=True)
        for number, answer in enumerate(answers)
    ]
    for reader in readers:
        reader.start()
    yield answers
    for reader in readers:
        reader.join(WAIT_S)
    for answer in answers:
        if answer.tokens not in (0, ANSWER_TOKENS):
            answer.failure = answer.failure or f"{answer.tokens} of {ANSWER_TOKENS} tokens"


def _read(url: str, model: str, prompt: str, answer: Answer) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as response:
            answer.instance = response.headers.get("x-penstock-instance", "")
            answer.request_id = response.headers.get("x-penstock-request-id", "")
            for line in response.iter_lines():
                _take(line, answer)
    except httpx.HTTPError as error:
        answer.failure = str(error) or type(error).__name__


def _take(line: str, answer: Answer) -> None:
    if line == "data: [DONE]":
        answer.is_done = True
    elif line.startswith("data: "):
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            answer.failure = str(chunk["error"])
        answer.chunks += 1
        answer.finish = next(
            (each["finish_reason"] for each in chunk.get("choices", ()) if each["finish_reason"]), answer.finish
        )
        answer.tokens = (chunk.get("usage") or {}).get("completion_tokens", answer.tokens)


def _check_whole(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.failure or not answer.is_done or answer.finish != "length" or not answer.tokens:
            raise Failed(f"a stream is not whole: {answer}")


def _ready(release: Release) -> int:
    """How many instances are ready, as the release's own `penstock status` sees it."""
    done = release.ask("status", "--json")
    if done.returncode != 0:
        return 0
    status = json.loads(done.stdout)
    well = all(role["health"] == "serving" for role in status["roles"])
    return sum(instance["state"] == "ready" for instance in status["instances"]) if well else 0


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _eventually(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise Failed(f"not within {WAIT_S:g} s: {what}")
        time.sleep(POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in reversed(processes):
        process.terminate()
    for process in reversed(processes):
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
