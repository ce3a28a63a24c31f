"""Rates and concurrency of keys, at one frontend and at several."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.membership import Member
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import frontend_pb2, frontend_pb2_grpc
from services.frontend.requests.api_keys import ApiKey, new_key_line
from services.frontend.requests.key_limits import KeyLimits, KeyUse, TokenBucket
from tests.examples import examples
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 5000)), min_size=1, max_size=40))
def test_tokens_that_are_over_are_waited_for(uses: list[tuple[float, int]]) -> None:
    key, limits, now_s, spent = ApiKey("alice", b"", tokens_per_min=600.0), KeyLimits(), 0.0, 0
    for pause_s, tokens_taken in uses:
        now_s += pause_s
        reached = limits.enter(key, now_s)
        if reached is not None:
            assert "600 tokens per minute" in reached.limit
            now_s += reached.retry_after_s + 1e-6
            assert limits.enter(key, now_s) is None, "after the announced wait"
        # What was taken before this one was allowed: a burst, the rate, and the one that went over.
        assert spent <= 100 + 10 * now_s + 5000
        limits.leave(key)
        limits.spend(key, tokens_taken, now_s)
        spent += tokens_taken


def test_a_changed_rate_is_taken_in() -> None:
    limits, slow = KeyLimits(), ApiKey("alice", b"", requests_per_min=1.0)
    assert limits.enter(slow, 0.0) is None
    assert limits.enter(slow, 0.0) is not None
    assert limits.enter(replace(slow, requests_per_min=60.0), 0.0) is None


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


def test_concurrency_is_given_back() -> None:
    limits, key = KeyLimits(), ApiKey("alice", b"", concurrency=1)
    assert limits.enter(key, 0.0) is None
    reached = limits.enter(key, 0.0)
    assert reached is not None
    assert "concurrent" in reached.limit
    limits.leave(key)
    assert limits.enter(key, 0.0) is None


@dataclass
class Mesh:
    """Frontends that tell each other through a network which loses and repeats."""

    limits: list[KeyLimits]
    lost: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(len(self.limits)):
            self.join(number)

    def join(self, number: int) -> None:
        """A frontend and all others meet."""
        for other, limits in enumerate(self.limits):
            if other != number:
                limits.frontend_joined(str(number))
                self.limits[number].frontend_joined(str(other))

    def tell(self, now_s: float, *, loses: bool = False, repeats: bool = False) -> None:
        """Everybody tells everybody one key's news, and again what was not told."""
        for number, limits in enumerate(self.limits):
            for other, hearing in enumerate(self.limits):
                uses = {} if other == number else limits.unsent_for(str(other), 1)
                if loses and uses:
                    limits.not_sent(str(other), uses)
                    continue
                for _ in range(1 + repeats):
                    hearing.heard(str(number), uses, now_s) if uses else None


FRONTENDS, TELL_S = 3, 0.2
ARRIVALS = st.lists(st.tuples(st.floats(0, 0.3), st.integers(0, FRONTENDS - 1)), min_size=1, max_size=150)
NETWORK = st.lists(st.sampled_from(["tells", "tells", "loses", "repeats"]), min_size=1, max_size=9)


@settings(max_examples=examples(100))
@given(ARRIVALS, NETWORK, st.sampled_from([6.0, 120.0, 600.0]))
def test_several_frontends_let_in_a_key_s_rate_once(
    arrivals: list[tuple[float, int]], network: list[str], per_min: float
) -> None:
    key, mesh = ApiKey("alice", b"", requests_per_min=per_min), Mesh([KeyLimits() for _ in range(FRONTENDS)])
    now_s, told, let_in = 0.0, 0, 0
    for pause_s, frontend in arrivals:
        now_s += pause_s
        while (told + 1) * TELL_S <= now_s:
            told += 1
            how = network[told % len(network)]
            mesh.tell(told * TELL_S, loses=how == "loses", repeats=how == "repeats")
        if mesh.limits[frontend].enter(key, now_s) is None:
            let_in += 1
            mesh.limits[frontend].leave(key)
        unheard_s = TELL_S * (1 + network.count("loses") if set(network) != {"loses"} else len(arrivals))
        bursts = FRONTENDS * (TokenBucket(per_min).burst + per_min / 60 * unheard_s)
        assert let_in <= per_min / 60 * now_s + bursts


def test_what_others_let_in_is_waited_for() -> None:
    key, mesh = ApiKey("alice", b"", requests_per_min=60.0), Mesh([KeyLimits(), KeyLimits()])
    here, there = mesh.limits
    assert all(here.enter(key, 0.0) is None for _ in range(10)), "a burst"
    mesh.tell(0.1)
    reached = there.enter(key, 0.1)
    assert reached is not None
    assert reached.retry_after_s == pytest.approx(1.0)
    assert there.enter(key, 1.1) is None
    mesh.tell(1.1)
    assert here.enter(key, 1.2) is not None, "that second was the other's"


def test_tokens_and_what_runs_elsewhere_count() -> None:
    key = ApiKey("alice", b"", concurrency=2, tokens_per_min=600.0)
    mesh = Mesh([KeyLimits(), KeyLimits()])
    here, there = mesh.limits
    assert here.enter(key, 0.0) is here.enter(key, 0.0) is None
    mesh.tell(0.0)
    reached = there.enter(key, 0.0)
    assert reached is not None
    assert "2 concurrent" in reached.limit
    here.leave(key)
    here.spend(key, 400, 0.0)
    mesh.tell(0.0)
    reached = there.enter(key, 0.0)
    assert reached is not None
    assert reached.retry_after_s == pytest.approx(30.0), "100 tokens are a burst, and 300 half a minute's"
    there.frontend_left("0")
    assert there.running("alice") == 0
    assert there.enter(key, 30.1) is None


def test_a_frontend_that_comes_does_not_wait_for_a_day_s_use() -> None:
    keys = [ApiKey(name, b"", requests_per_min=60.0) for name in ("alice", "bob")]
    mesh = Mesh([KeyLimits(), KeyLimits()])
    for second in range(500):
        for key in keys:
            assert mesh.limits[0].enter(key, float(second)) is None
            mesh.limits[0].leave(key)
    mesh.tell(500.0)
    mesh.tell(500.0)
    mesh.limits[1] = KeyLimits()
    mesh.join(1)
    mesh.tell(500.0, loses=True)
    mesh.tell(500.0)
    mesh.tell(500.0)
    assert all(mesh.limits[1].enter(key, 500.0) is None for key in keys)
    # From then on it hears of all.
    for key in keys:
        while mesh.limits[0].enter(key, 500.0) is None:
            pass
    mesh.tell(500.0)
    mesh.tell(500.0)
    assert all(mesh.limits[1].enter(key, 500.0) is not None for key in keys)


def test_who_has_no_bounds_is_not_sent_of_and_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.requests.key_limits.MAX_BUCKETS", 3)
    limits = KeyLimits()
    limits.frontend_joined("other")
    limits.enter(ApiKey("free", b""), 0.0)
    assert not limits.is_behind("other")
    for number in range(9):
        key = ApiKey(f"jwt:{number}", b"", requests_per_min=60.0)
        limits.enter(key, 0.0)
        limits.leave(key)
        limits.heard("other", {key.name: KeyUse(requests=1, requests_per_min=60.0)}, 0.0)
    assert set(limits.unsent_for("other", 9)) == {"jwt:6", "jwt:7", "jwt:8"}
    limits.frontend_left("other")
    limits.not_sent("other", {"jwt:8": KeyUse()})
    assert not limits.knows("other")


@pytest.mark.live
async def test_what_runs_at_one_frontend_is_refused_at_another(model_path: Path, tmp_path: Path) -> None:
    key, line = new_key_line("alice", bytes(32), concurrency=1)
    (tmp_path / "keys").write_text(line)
    body, bearer = {"model": "demo", "prompt": "x", "max_tokens": 900}, {"authorization": f"Bearer {key}"}
    keys = {"api_keys_file": tmp_path / "keys"}
    async with (
        mesh_of_fakes(model_path, **keys) as here,
        mesh_of_fakes(model_path, lambda _: tokens([70], [1]), **keys) as there,
        here.http() as asked_here,
        there.http() as asked_there,
    ):
        await here.add_worker(lambda _: tokens(*([70] for _ in range(900))), step_s=0.1)
        for each, other in ((here, there), (there, here)):
            each.directory.join(frontend(other))
        async with asked_here.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=bearer):
            await there.until(lambda: there.service.key_limits.running("alice") == 1)
            assert (await asked_there.post("/v1/completions", json=body, headers=bearer)).status_code == 429
        await there.until(lambda: there.service.key_limits.running("alice") == 0)
        assert (await asked_there.post("/v1/completions", json=body, headers=bearer)).status_code == 200
        there.directory.leave(frontend(here))
        assert not there.service.key_limits.knows("first")


def frontend(of: MeshOfFakes) -> Member:
    return Member("frontend", "other", "first", of.rpc_address, "")


@pytest.mark.live
async def test_strangers_and_bounds_that_are_none_are_refused(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh, open_channel(GrpcTransport(), mesh.rpc_address) as channel:

        async def refusal(per_min: float) -> grpc.StatusCode:
            use = frontend_pb2.KeyUse(key="alice", requests=9, requests_per_min=per_min)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await frontend_pb2_grpc.FrontendStub(channel).ShareUse(
                    frontend_pb2.ShareUseRequest(incarnation_id="first", uses=[use])
                )
            return refused.value.code()

        assert await refusal(60.0) is grpc.StatusCode.UNAVAILABLE, "until the directory has told of it"
        mesh.directory.join(frontend(mesh))
        for per_min in (0.0, -1.0, float("inf"), float("nan")):
            assert await refusal(per_min) is grpc.StatusCode.INVALID_ARGUMENT
