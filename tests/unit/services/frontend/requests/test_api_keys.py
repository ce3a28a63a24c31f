import hashlib
from pathlib import Path

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import ConfigurationError
from services.frontend.requests.api_keys import ApiKey, KeyLimits, KeyRing, TokenBucket, new_key_line
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes

SECRET = bytes(range(32))


def key_file(path: Path, *lines: str) -> Path:
    file = path / "keys"
    file.write_text("# comment\n\n" + "\n".join(lines) + "\n")
    return file


def test_a_new_key_is_found_and_its_line_does_not_hold_it(tmp_path: Path) -> None:
    (alice, alice_line), (bob, bob_line) = (
        new_key_line("alice", b"a" * 32, 30, 4),
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


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice:xyz",
        f"al ice:{'0' * 64}",
        f"alice:{'0' * 64}:fast",
        f"alice:{'0' * 64}:-1",
        f"alice:{'0' * 64}:1:0",
        f"alice:{'0' * 64}:1:2:3",
        f"a:{'0' * 64}\na:{'1' * 64}",
    ],
)
def test_a_wrong_key_file_is_refused_with_the_place(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigurationError, match="keys"):
        KeyRing.load(key_file(tmp_path, line))


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        KeyRing.load(tmp_path / "none")


@given(text=st.text())
def test_any_text_can_be_presented(text: str) -> None:
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    ring = KeyRing([ApiKey("alice", digest)])
    assert ring.find(text) == ApiKey("alice", digest)
    assert ring.find(text + "x") is None


@given(per_min=st.floats(0.1, 10_000), gaps_s=st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_a_bucket_never_gives_more_than_its_rate_and_keeps_its_word(per_min: float, gaps_s: list[float]) -> None:
    bucket, now_s = TokenBucket(per_min), 0.0
    for taken, gap_s in enumerate(gaps_s, 1):
        now_s += gap_s
        wait_s = bucket.take(now_s)
        if wait_s > 0:
            now_s += wait_s
            assert bucket.take(now_s) == 0.0, "after the announced wait"
        assert taken <= bucket.burst + now_s * per_min / 60 + 1e-3


def test_concurrency_is_given_back(tmp_path: Path) -> None:
    key_text, line = new_key_line("alice", SECRET, concurrency=1)
    key = KeyRing.load(key_file(tmp_path, line)).find(key_text)
    assert key is not None
    limits = KeyLimits()
    assert limits.enter(key, 0.0) is None
    reached = limits.enter(key, 0.0)
    assert reached is not None
    assert "concurrent" in reached.limit
    limits.leave(key)
    assert limits.enter(key, 0.0) is None


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
