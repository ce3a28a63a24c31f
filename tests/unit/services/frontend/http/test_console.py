"""The console over HTTP: who gets what, and what operators may do."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from mesh.membership import Member
from services.frontend.http.routes_console import HEADERS
from services.frontend.requests.api_keys import new_key_line
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = pytest.mark.live

HTML = {"accept": "text/html,application/xhtml+xml"}
UPLOT = Path(__file__).parents[5] / "services/frontend/console/assets/vendor/uplot"


def answers(_: Any) -> Any:
    return tokens([70], [1])


def announce_itself(mesh: MeshOfFakes) -> None:
    mesh.directory.join(Member("frontend", "frontend-0", "first", mesh.rpc_address, ""))


async def test_a_browser_is_led_to_the_console_and_others_are_not(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, answers) as mesh, mesh.http() as http:
        led = await http.get("/", headers=HTML)
        assert (led.status_code, led.headers["location"]) == (303, "console")
        assert (await http.get("/")).status_code == 404
        page = await http.get("/console", headers=HTML)
        assert page.status_code == 200
        assert "<title>Penstock" in page.text
        assert HEADERS.items() <= dict(page.headers).items()
        again = await http.get("/console", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_there_is_none_without(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, answers, console=False) as mesh, mesh.http() as http:
        for path in (
            "/",
            "/console",
            "/console/state",
            "/console/events",
            "/console/assets/vendor/uplot/uPlot.min.css",
        ):
            assert (await http.get(path, headers=HTML)).status_code == 404


@pytest.mark.parametrize("path", ["../state.py", "%2e%2e/state.py", "nothing.js", "vendor/uplot/LICENSE", ""])
async def test_only_files_of_the_page_are_served(model_path: Path, path: str) -> None:
    async with mesh_of_fakes(model_path, answers) as mesh, mesh.http() as http:
        assert (await http.get(f"/console/assets/{path}")).status_code == 404


async def test_everything_that_the_page_names_is_there_and_nothing_of_it_is_inline(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, answers) as mesh, mesh.http() as http:
        page = (await http.get("/console")).text
        named = re.findall(r'(?:src|href)="(console/[^"]+)"', page)
        assert len(named) == 5
        modules = [name for name in named if name.endswith("main.js")]
        while modules:
            script = await http.get(f"/{modules[-1]}")
            assert script.headers["content-type"].startswith("text/javascript")
            imported = re.findall(r'from "\./([^"]+)"', script.text)
            modules = modules[:-1] + [
                f"console/assets/{name}" for name in imported if f"console/assets/{name}" not in named
            ]
            named += modules
            assert "innerHTML" not in script.text, "text is set as text"
        for name in named:
            assert (await http.get(f"/{name}")).status_code == 200, name
        assert not re.search(r"<script(?![^>]*src=)| on[a-z]+=| style=", page)


async def test_the_state_has_the_mesh_and_never_a_text(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, answers) as mesh, mesh.http() as http:
        announce_itself(mesh)
        answer = await mesh.client().completions.create(model="demo", prompt="a secret prompt")
        state = (await http.get("/console/state")).json()
        assert [row[0] for row in state["instances"]] == ["worker-0"]
        (request,) = state["body"]["requests"]
        assert (request["request_id"], request["instance"], request["status"]) == (answer.id, "worker-0", 200)
        assert "secret" not in json.dumps(state)
        assert state["viewer"] == {"owner": "", "may_act": False}
        story = (await http.get(f"/console/requests/{answer.id}")).json()
        assert [span["name"] for span in story["spans"]] == ["admission", "placement", "prefill", "decode"]
        assert (await http.get("/console/requests/unknown")).status_code == 404


async def test_events_come_as_a_stream_that_ends_when_the_frontend_drains(model_path: Path) -> None:
    async with (
        mesh_of_fakes(model_path, answers) as mesh,
        mesh.http() as http,
        http.stream("GET", "/console/events") as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = (line async for line in stream.aiter_lines())
        first = json.loads((await anext(lines)).removeprefix("data: "))
        assert first["is_whole"]
        await mesh.role.drain()
        async for _ in lines:
            pass  # it ends, or this test does not


def _keys(folder: Path) -> tuple[Path, Mapping[str, str]]:
    made = {
        name: new_key_line(name, hashlib.sha256(name.encode()).digest(), is_operator=name == "ops")
        for name in ("ops", "user", "other")
    }
    file = folder / "keys"
    file.write_text("\n".join(line for _, line in made.values()))
    return file, {name: key for name, (key, _) in made.items()}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_keys_guard_everything_but_the_empty_page(model_path: Path, tmp_path: Path) -> None:
    file, keys = _keys(tmp_path)
    async with mesh_of_fakes(model_path, answers, api_keys_file=file) as mesh, mesh.http() as http:
        announce_itself(mesh)
        assert (await http.get("/console")).status_code == 200
        for path in ("/console/state", "/console/events", "/console/requests/x"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=bearer("sk-penstock-wrong"))).status_code == 401
        assert (await http.post("/console/actions", json={"action": "drain", "instance": "a"})).status_code == 401
        answer = await mesh.client(keys["user"]).completions.create(model="demo", prompt="x")
        seen = {
            name: (await http.get("/console/state", headers=bearer(key))).json()["body"]["requests"]
            for name, key in keys.items()
        }
        assert {name: len(rows) for name, rows in seen.items()} == {"ops": 1, "user": 1, "other": 0}
        path = f"/console/requests/{answer.id}"
        statuses = {name: (await http.get(path, headers=bearer(key))).status_code for name, key in keys.items()}
        assert statuses == {"ops": 200, "user": 200, "other": 404}


async def _act(http: httpx.AsyncClient, action: dict[str, Any], key: str) -> httpx.Response:
    return await http.post("/console/actions", json=action, headers=bearer(key) if key else {})


async def test_only_operators_act(model_path: Path, tmp_path: Path) -> None:
    file, keys = _keys(tmp_path)
    drain = {"action": "drain", "instance": "nobody"}
    async with mesh_of_fakes(model_path, answers, api_keys_file=file) as mesh, mesh.http() as http:
        refused = await _act(http, drain, keys["user"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_operator")
        unknown = await _act(http, drain, keys["ops"])
        assert (unknown.status_code, unknown.json()["error"]["message"]) == (
            503,
            "there is no worker 'nobody' in the mesh",
        )
        assert (await _act(http, {"action": "reboot"}, keys["ops"])).status_code == 400
    async with mesh_of_fakes(model_path, answers) as mesh, mesh.http() as http:
        nobody = await _act(http, drain, "")
        assert nobody.status_code == 403
        assert "read-only" in nobody.json()["error"]["message"]


def test_the_vendored_chart_library_is_as_it_was_published() -> None:
    """uPlot 1.6.32, as `npm pack uplot` brings it: nobody edits it here."""
    published = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    assert {path.name for path in UPLOT.iterdir()} == published.keys()
    for name, digest in published.items():
        assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == digest
