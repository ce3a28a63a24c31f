import asyncio
import hashlib
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import ConfigurationError
from services.frontend.requests.api_keys import (
    ApiKey,
    KeyFile,
    KeyRing,
    new_key_line,
    parse_line,
)
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes

SECRET = bytes(range(32))


def key_file(path: Path, *lines: str) -> Path:
    file = path / "keys"
    file.write_text("# comment\n\n" + "\n".join(lines) + "\n")
    return file


def test_a_new_key_is_found_and_its_line_does_not_hold_it(tmp_path: Path) -> None:
    (alice, alice_line), (bob, bob_line) = (
        new_key_line("alice", b"a" * 32, requests_per_min=30.0, concurrency=4),
        new_key_line("bob", b"b" * 32, concurrency=2),
    )
    assert alice not in alice_line
    ring = KeyRing.load(key_file(tmp_path, alice_line, bob_line))
    found = ring.find(alice)
    assert found is not None
    assert (found.name, found.requests_per_min, found.concurrency) == ("alice", 30, 4)
    found = ring.find(bob)
    assert found is not None
    assert (found.name, found.requests_per_min, found.concurrency) == ("bob", None, 2)
    assert ring.find(alice + "x") is None
    assert ring.find("") is None


@pytest.mark.live
async def test_an_operator_may_load_adapters_and_nobody_else(model_path: Path, tmp_path: Path) -> None:
    (alice, alice_line), (root, root_line) = (
        new_key_line("alice", b"a" * 32, requests_per_min=6000.0, concurrency=4),
        new_key_line("root", b"r" * 32, is_operator=True),
    )
    file = key_file(tmp_path, alice_line, root_line)
    assert root_line.endswith(":operator")
    settings = {"api_keys_file": file, "allow_runtime_lora_updating": True}
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1]), **settings) as mesh, mesh.http() as http:
        for key, status in (("unknown", 401), (alice, 403), (root, 400)):
            headers = {"authorization": f"Bearer {key}"}
            for path in ("/v1/load_lora_adapter", "/adapters", "/v1/unload_lora_adapter"):
                answer = await http.post(path, json={}, headers=headers)
                assert answer.status_code == status, (path, answer.text)
            gone = await http.delete("/adapters/poet", headers=headers)
            assert gone.status_code == (404 if key == root else status), gone.text
        assert answer.json()["error"]["param"] == "lora_name", "an operator is asked for what to do"


@pytest.mark.parametrize(
    "line",
    [
        f"alice:{'0' * 64}:::operators",
        "alice",
        "alice:xyz",
        f"al ice:{'0' * 64}",
        f"alice:{'0' * 64}:fast",
        f"alice:{'0' * 64}:-1",
        f"alice:{'0' * 64}:1:0",
        f"alice:{'0' * 64}:1:2:3",
        f"alice:{'0' * 64}:requests_per_min=",
        f"alice:{'0' * 64}:30:requests_per_min=30",
        f"alice:{'0' * 64}:speed=3",
        f"alice:{'0' * 64}:expires=tomorrow",
        f"alice:{'0' * 64}:models=a,,b",
        f"alice:{'0' * 64}:lowest_priority=1.5",
        f"alice:{'0' * 64}:is_operator=operator",
        f"a:{'0' * 64}\na:{'1' * 64}",
    ],
)
def test_a_wrong_key_file_is_refused_with_the_place(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigurationError, match="keys"):
        KeyRing.load(key_file(tmp_path, line))


@given(
    requests_per_min=st.none() | st.floats(0.1, 1e6).map(lambda value: float(f"{value:.6g}")),
    concurrency=st.none() | st.integers(1, 10**9 - 1),
    tokens_per_min=st.none() | st.integers(1, 10**11).map(float),
    tokens_per_day=st.none() | st.integers(1, 10**11).map(float),
    tokens_per_month=st.none() | st.integers(1, 10**11).map(float),
    expires=st.none() | st.dates(),
    models=st.frozensets(st.from_regex(r"[A-Za-z0-9./_-]{1,12}", fullmatch=True)),
    lowest_priority=st.none() | st.integers(-(10**9) + 1, 10**9 - 1),
    share=st.integers(1, 1000).map(float),
    is_operator=st.booleans(),
)
def test_a_line_says_what_a_key_was_made_with(**bounds: Any) -> None:
    key_text, line = new_key_line("alice", SECRET, **bounds)
    (key,) = [KeyRing([parse_line(line, "here")]).find(key_text)]
    assert key == ApiKey("alice", hashlib.sha256(key_text.encode()).digest(), **bounds)


def test_lines_without_names_are_read_as_before() -> None:
    line = f"alice:{'0' * 64}"
    plain = parse_line(line, "here")
    assert parse_line(f"{line}:30:4:operator", "here") == replace(
        plain, requests_per_min=30.0, concurrency=4, is_operator=True
    )
    assert parse_line(f"{line}:::operator", "here") == replace(plain, is_operator=True)
    assert parse_line(f"{line}::4:models=a", "here") == replace(plain, concurrency=4, models=frozenset("a"))


def test_a_key_opens_until_its_last_day_is_over() -> None:
    key = ApiKey("alice", b"", expires=date(2027, 12, 31))
    midnight_unix_s = datetime(2028, 1, 1, tzinfo=UTC).timestamp()
    assert not key.has_expired(midnight_unix_s - 1)
    assert key.has_expired(midnight_unix_s)


def test_a_changed_file_is_taken_in_and_a_bad_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (alice, alice_line), (bob, bob_line) = new_key_line("alice", b"a" * 32), new_key_line("bob", b"b" * 32)
    file = KeyFile(key_file(tmp_path, alice_line))
    assert file.look() is None
    key_file(tmp_path, bob_line, alice_line)
    ring = file.look()
    assert ring is not None
    assert ring.find(bob)
    key_file(tmp_path, "half a li")
    assert file.look() is None
    assert "the former keys stay" in caplog.text
    assert file.ring.find(alice)
    (tmp_path / "keys").unlink()
    assert file.look() is None
    key_file(tmp_path, bob_line)
    ring = file.look()
    assert ring is not None
    assert ring.find(alice) is None


@pytest.mark.live
async def test_a_key_asks_for_its_models_by_its_priority_and_only_in_its_time(model_path: Path, tmp_path: Path) -> None:
    keys = {
        "all": new_key_line("all", b"a" * 32),
        "other": new_key_line("other", b"b" * 32, models=["other"]),
        "patient": new_key_line("patient", b"c" * 32, models=["demo"], lowest_priority=5, tokens_per_min=6.0),
        "late": new_key_line("late", b"d" * 32, expires=date(2001, 1, 1)),
    }
    file = key_file(tmp_path, *(line for _, line in keys.values()))
    settings = {"api_keys_file": file}
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1]), **settings) as mesh, mesh.http() as http:

        async def ask(name: str, **fields: Any) -> tuple[int, Any]:
            headers, body = {"authorization": f"Bearer {keys[name][0]}"}, {"model": "demo", "prompt": "x", **fields}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            return answer.status_code, answer.json().get("error", {}).get("code")

        async def models(name: str) -> list[str]:
            answer = await http.get("/v1/models", headers={"authorization": f"Bearer {keys[name][0]}"})
            return [each["id"] for each in answer.json()["data"]]

        assert await ask("all") == (200, None)
        assert await ask("other") == (404, "model_not_found")
        assert (await models("all"), await models("other")) == (["demo"], [])
        assert (await ask("late"))[0] == 401
        assert (await ask("patient", priority=0))[0] == 400
        assert await ask("patient") == (200, None)
        (worker,) = mesh.workers
        assert [each.priority for each in worker.received] == [0, 5]
        assert await ask("patient") == (429, "rate_limit_exceeded"), "its minute's tokens are spent"
        key_file(tmp_path, keys["late"][1])
        async with asyncio.timeout(30):
            while (await ask("all"))[0] != 401:  # noqa: ASYNC110 - the file is looked at every second
                await asyncio.sleep(0.1)


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        KeyRing.load(tmp_path / "none")


@given(text=st.text())
def test_any_text_can_be_presented(text: str) -> None:
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    ring = KeyRing([ApiKey("alice", digest)])
    assert ring.find(text) == ApiKey("alice", digest)
    assert ring.find(text + "x") is None


@pytest.mark.live
@pytest.mark.slow
async def test_keys_are_asked_for_and_limits_hold(model_path: Path, tmp_path: Path) -> None:
    key, line = new_key_line("alice", SECRET, requests_per_min=6)
    keys = key_file(tmp_path, line)
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1]), api_keys_file=keys) as mesh:
        with pytest.raises(openai.AuthenticationError) as refused:
            await mesh.client("sk-wrong").completions.create(model="demo", prompt="x")
        assert refused.value.code == "invalid_api_key"
        async with mesh.http() as http:
            assert (await http.post("/v1/completions", json={})).status_code == 401
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/health")).status_code == 200
        client = mesh.client(key)
        await client.completions.create(model="demo", prompt="x")
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="demo", prompt="x")
        assert 1 <= int(limited.value.response.headers["retry-after"]) <= 11


@pytest.mark.parametrize("name", ["a:b", "../..", "", "a b"])
def test_a_key_has_a_name_that_fits_into_its_line(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no key name"):
        new_key_line(name, SECRET)
