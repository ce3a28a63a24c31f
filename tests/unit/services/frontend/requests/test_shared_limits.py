"""Frontends tell each other what they let in: whom, and how often."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from mesh.membership import Member
from services.frontend.requests.api_keys import ApiKey
from services.frontend.requests.key_limits import KeyLimits
from services.frontend.requests.shared_limits import RETOLD_ROUNDS, SharedLimits


class Peers:
    """One other frontend, of an earlier release."""

    def __init__(self) -> None:
        self.member = Member("frontend", "other", "1", "127.0.0.1:1", "")
        self.asked = 0
        self.on_joined: list[Callable[[Member], None]] = []
        self.on_left: list[Callable[[Member], None]] = []

    def members(self) -> list[Member]:
        return [self.member]

    def stub(self, _: Member) -> Any:
        return SimpleNamespace(ShareUse=self.refuse)

    async def refuse(self, *_: Any, **__: Any) -> None:
        self.asked += 1
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, nothing, nothing, "no such method")


async def test_a_frontend_of_an_earlier_release_is_told_again_once_a_minute_or_when_it_has_changed() -> None:
    limits, peers, rounds = KeyLimits(), Peers(), 0
    shared = SharedLimits(limits, "own", peers)  # type: ignore[arg-type]
    limits.frontend_joined("1")
    limits.enter(ApiKey("alice", b"", requests_per_min=60.0), 0.0)

    async def sleep(_: float) -> None:
        nonlocal rounds
        if rounds == 2 * RETOLD_ROUNDS:
            peers.member = replace(peers.member, attributes={"release": "later"})
        if rounds == 2 * RETOLD_ROUNDS + 10:
            raise EOFError
        rounds += 1
        for _ in range(3):
            await asyncio.sleep(0)

    with pytest.raises(EOFError):
        await shared.tell(sleep)
    assert peers.asked == 3, "at the start, after a minute and when its record has changed"
    assert limits.is_behind("1"), "nothing of it is lost"
    await shared.stop()
