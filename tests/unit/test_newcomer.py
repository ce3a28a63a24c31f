"""`make newcomer` on a repository whose `make up` answers at once, or does not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = """
install:
\t@echo installed
up:
\t@{python} server.py $(ARGS)
"""
IN_THE_BACKGROUND = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
"""What a shell starts with `&` ignores Ctrl-C, and so does what it starts. A shell sets that, since `preexec_fn` would
fork this process with the threads of gRPC in it, which then abort it."""
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        content = f"{asked['model']} counts"
        self.wfile.write(json.dumps({"choices": [{"message": {"content": content}}]}).encode())

port = int(sys.argv[2])
server = HTTPServer(("127.0.0.1", port), Answer)
print(f"serving at http://127.0.0.1:{port} after 0.1 s")
print('try:    curl -d {"model": "demo", "messages": []}', flush=True)
try:
    server.serve_forever()
except KeyboardInterrupt:
    pass
"""


def newcomer(folder: Path, server: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    if shutil.which("git") is None or shutil.which("make") is None:
        pytest.skip("git and make are needed")
    (folder / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    (folder / "server.py").write_text(server)
    for command in ("init -q", "add .", "-c user.name=n -c user.email=n@n commit -qm all"):
        subprocess.run(("git", "-C", str(folder), *command.split()), check=True)
    script = (sys.executable, str(ROOT / "scripts" / "newcomer.py"), "--from", str(folder), *arguments)
    return subprocess.run((*IN_THE_BACKGROUND, *script), capture_output=True, text=True, timeout=120, check=False)


def test_each_step_is_timed_to_the_first_answer(tmp_path: Path) -> None:
    done = newcomer(tmp_path, SERVER, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    names = [step["name"] for step in told["steps"]]
    assert [name.split(" ARGS")[0] for name in names] == [
        f"git clone {tmp_path}",
        "make install",
        "make up",
        "the first answer",
    ]
    assert told["answer"] == "demo counts"
    assert told["total_s"] == pytest.approx(sum(step["seconds"] for step in told["steps"]))


def test_what_fails_is_shown(tmp_path: Path) -> None:
    done = newcomer(tmp_path, "raise SystemExit('no GPU driver')")
    assert done.returncode == 1
    assert "the mesh ended with 2" in done.stderr
    assert "no GPU driver" in done.stderr
