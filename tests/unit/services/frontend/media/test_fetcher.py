"""Fetching, against servers that are functions."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import pytest

from mesh.runtime import SystemThreads
from services.frontend.errors import ApiError
from services.frontend.media.fetcher import MAX_REDIRECTS, MediaFetcher
from services.frontend.media.rules import MediaRules

pytestmark = pytest.mark.live

ADDRESSES = {"example.org": ["93.184.215.14"], "inner.example.org": ["10.0.0.1"], "images": ["10.0.0.2"]}
CAT = b"a picture of a cat"
Answer = Callable[[httpx.Request], httpx.Response]


def fetcher(answer: Answer, *, timeout_s: float = 5.0, **rules: object) -> MediaFetcher:
    async def resolve(host: str, port: int) -> Sequence[str]:
        if host not in ADDRESSES:
            raise OSError(f"unknown host {host}")
        return ADDRESSES[host]

    http = httpx.MockTransport(answer)
    return MediaFetcher(MediaRules(1000, **rules), timeout_s, SystemThreads(), http, resolve)  # type: ignore[arg-type]


def sent(content: bytes, **headers: str) -> httpx.Response:
    """As it comes from a network: not read yet."""
    return httpx.Response(200, headers=headers, stream=httpx.ByteStream(content))


def cat(_: httpx.Request) -> httpx.Response:
    return sent(CAT)


async def refusal(fetching: MediaFetcher, url: str, max_bytes: int = 1000) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await fetching.fetch(url, max_bytes, "p")
    assert (refused.value.status, refused.value.param) == (400, "p")
    return refused.value


async def test_a_url_is_asked_at_the_address_that_was_checked() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return cat(request)

    assert await fetcher(answer).fetch("https://example.org:8443/cat.png?size=1", 1000, "p") == CAT
    (request,) = asked
    assert str(request.url) == "https://93.184.215.14:8443/cat.png?size=1"
    assert request.headers["host"] == "example.org:8443"
    assert request.extensions["sni_hostname"] == "example.org"


@pytest.mark.parametrize("url", ["http://inner.example.org/", "http://images/"])
async def test_the_mesh_s_own_network_is_not_asked(url: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise AssertionError("asked")

    assert "not on the public network" in (await refusal(fetcher(answer), url)).message


async def test_unless_the_host_is_named() -> None:
    fetching = fetcher(cat, allowed_domains=("images",))
    assert await fetching.fetch("http://images/cat.png", 1000, "p") == CAT
    assert "allowed domains" in (await refusal(fetching, "http://example.org/cat.png")).message


@pytest.mark.parametrize("location", ["http://inner.example.org/", "file:///etc/passwd", "gopher://example.org/"])
async def test_a_redirect_leads_nowhere_else(location: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["host"] == "example.org"
        return httpx.Response(302, headers={"location": location})

    await refusal(fetcher(answer), "http://example.org/")


async def test_redirects_are_followed_and_bounded() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        left = int(request.url.path.strip("/"))
        return httpx.Response(302, headers={"location": f"/{left - 1}"}) if left else cat(request)

    assert await fetcher(answer).fetch(f"http://example.org/{MAX_REDIRECTS}", 1000, "p") == CAT
    assert "redirects" in (await refusal(fetcher(answer), f"http://example.org/{MAX_REDIRECTS + 1}")).message


async def test_an_endless_answer_is_cut_off() -> None:
    read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 10
            yield bytes(10)

    error = await refusal(fetcher(lambda _: httpx.Response(200, content=pieces())), "http://example.org/", 100)
    assert error.code == "media_too_large"
    assert read <= 130


async def test_a_server_that_says_nothing_is_given_up() -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    error = await refusal(fetcher(answer, timeout_s=0.01), "http://example.org/")  # type: ignore[arg-type]
    assert "longer than" in error.message


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda _: httpx.Response(404), "answered 404"),
        (lambda _: sent(b""), "nothing"),
        (lambda _: sent(CAT, **{"content-encoding": "br"}), "compresses"),
    ],
)
async def test_what_is_wrong_is_said(answer: Answer, reason: str) -> None:
    assert reason in (await refusal(fetcher(answer), "http://example.org/")).message


@pytest.mark.parametrize(
    "url", ["http://", "http://nowhere/", "ftp://example.org/", "cat.png", "http://[::1", "http://\x00/"]
)
async def test_wrong_urls_are_refused(url: str) -> None:
    await refusal(fetcher(cat), url)


async def test_files_of_one_directory_only(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a cat.png").write_bytes(CAT)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "open" / "way out").symlink_to(tmp_path / "secret")
    fetching = fetcher(cat, local_path=str(tmp_path / "open"))
    assert await fetching.fetch(f"file://{tmp_path}/open/a%20cat.png", 1000, "p") == CAT
    for path in ("secret", "open/../secret", "open/way%20out", "open", "open/none"):
        await refusal(fetching, f"file://{tmp_path}/{path}")
    assert (await refusal(fetching, f"file://{tmp_path}/open/a%20cat.png", 5)).code == "media_too_large"
    assert "--allowed-local-media-path" in (await refusal(fetcher(cat), f"file://{tmp_path}/secret")).message
