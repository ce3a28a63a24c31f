"""Budgets of keys: a day and a month, over several frontends, their restarts, and a store that comes and goes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import ConfigurationError, StoreUnavailable
from mesh.runtime import system_runtime
from mesh.store import StateStore, open_store
from services.cli.budgets import lines_of
from services.frontend.requests.api_keys import ApiKey, new_key_line
from services.frontend.requests.key_budgets import (
    BUDGETS_PREFIX,
    MAX_INCARNATIONS,
    BudgetRecord,
    KeyBudgets,
    Period,
    WindowUse,
    key_of,
)
from services.frontend.requests.stored_budgets import StoredBudgets
from tests.examples import examples
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes

DAY_S = 86_400.0
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
KEY = ApiKey("alice", b"", tokens_per_day=1000.0, tokens_per_month=2500.0)


class UnreliableStore:
    """Whatever the test says of the next write: it is done, lost, or done without an answer."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.how = "answers"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def compare_and_swap(self, *arguments: Any) -> Any:
        if self.how == "is away":
            raise StoreUnavailable("the store is away")
        revision = await self._store.compare_and_swap(*arguments)
        if self.how == "says nothing":
            raise StoreUnavailable("the store has not answered")
        return revision


@dataclass
class Frontends:
    """Some that share one store, of which each may begin anew under another incarnation."""

    store: UnreliableStore
    unix_s: float = NOON
    numbers: Any = field(default_factory=count)
    running: list[StoredBudgets] = field(default_factory=list)

    def start(self) -> StoredBudgets:
        made = KeyBudgets(f"incarnation-{next(self.numbers)}")
        return StoredBudgets(made, cast(StateStore, self.store), lambda: self.unix_s)

    async def hear(self, frontend: StoredBudgets) -> None:
        """All that the store has, as its watch would bring it."""
        listing = await self.store.range(BUDGETS_PREFIX)
        for entry in listing.entries:
            frontend._followed._take(entry.key, entry.value)


@asynccontextmanager
async def frontends(number: int) -> AsyncIterator[Frontends]:
    store = open_store("embedded:", system_runtime())
    mesh = Frontends(UnreliableStore(store))
    mesh.running = [mesh.start() for _ in range(number)]
    yield mesh
    await store.close()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["spend", "spend", "spend", "flush", "restart", "pass"]),
        st.integers(0, 2),
        st.sampled_from(["answers", "answers", "is away", "says nothing"]),
        st.integers(1, 400),
    ),
    max_size=40,
)


@settings(max_examples=examples(60))
@given(EVENTS)
async def test_tokens_count_once_whatever_becomes_of_writes_and_frontends(
    events: list[tuple[str, int, str, int]],
) -> None:
    async with frontends(3) as mesh:
        spent: dict[str, int] = {}
        for event, number, how, amount in events:
            frontend = mesh.running[number]
            mesh.store.how = how
            if event == "spend":
                frontend.budgets.spend(KEY, amount, mesh.unix_s)
                for period in Period:
                    window = period.window(mesh.unix_s)
                    spent[window] = spent.get(window, 0) + amount
            elif event == "flush":
                await frontend.flush()
                await mesh.hear(frontend)
            elif event == "pass":
                mesh.unix_s += amount / 400 * DAY_S
            else:
                mesh.store.how = "answers"
                await frontend.stop()
                assert not len(frontend.budgets)
                mesh.running[number] = mesh.start()
                await mesh.hear(mesh.running[number])
            for each in mesh.running:
                each.budgets.validate()
                for period in Period:
                    assert each.budgets.used("alice", period, mesh.unix_s) <= spent.get(period.window(mesh.unix_s), 0)
        mesh.store.how = "answers"
        for frontend in mesh.running:
            await frontend.stop()
        for frontend in (*mesh.running, mesh.start()):
            await mesh.hear(frontend)
            for period in Period:
                used = frontend.budgets.used("alice", period, mesh.unix_s)
                assert used == spent.get(period.window(mesh.unix_s), 0), "no token is lost or counted twice"


async def test_a_frontend_that_begins_anew_knows_what_was_used() -> None:
    async with frontends(2) as mesh:
        here, there = mesh.running
        here.budgets.spend(KEY, 700, mesh.unix_s)
        assert here.budgets.reached(KEY, mesh.unix_s) is None
        await here.stop()
        anew = mesh.start()
        for frontend in (there, anew):
            await mesh.hear(frontend)
            frontend.budgets.spend(KEY, 150, mesh.unix_s)
            await frontend.flush()
        await mesh.hear(there)
        reached = there.budgets.reached(KEY, mesh.unix_s)
        assert reached is not None
        assert (reached.period, reached.tokens, reached.retry_after_s) == (Period.DAY, 1000.0, DAY_S / 2)
        (entry,) = (await mesh.store.range(BUDGETS_PREFIX)).entries
        assert entry.key == key_of("alice")
        assert len(entry.value) < 400


def test_a_day_and_a_month_begin_anew() -> None:
    budgets = KeyBudgets("first")
    for day in range(3):
        assert budgets.reached(KEY, NOON + day * DAY_S) is None
        budgets.spend(KEY, 1000, NOON + day * DAY_S)
        reached = budgets.reached(KEY, NOON + day * DAY_S)
        assert reached is not None
    assert (reached.period, f"{reached.begins_anew:%Y-%m-%d %H:%M}") == (Period.MONTH, "2026-12-01 00:00")
    assert budgets.reached(KEY, NOON + 4 * DAY_S) is not None
    assert budgets.reached(KEY, reached.begins_anew.timestamp()) is None
    assert budgets.forget_past(reached.begins_anew.timestamp(), 9) == []
    assert budgets.used("alice", Period.MONTH, NOON) == 0, "it was forgotten"


@given(st.floats(0, 4e9))
def test_a_window_ends_where_the_next_one_begins(unix_s: float) -> None:
    for period in Period:
        end_s = period.end(unix_s).timestamp()
        assert unix_s < end_s <= unix_s + (31 if period is Period.MONTH else 1) * DAY_S
        assert period.window(end_s - 0.001) == period.window(unix_s) < period.window(end_s)


def test_a_clock_that_steps_back_gives_nothing_back() -> None:
    budgets = KeyBudgets("first")
    budgets.spend(KEY, 900, NOON)
    budgets.spend(KEY, 100, NOON - DAY_S)
    assert budgets.used("alice", Period.DAY, NOON) == 1000
    assert budgets.reached(KEY, NOON - DAY_S) is not None


@given(st.lists(st.tuples(st.integers(0, 2 * MAX_INCARNATIONS), st.integers(1, 9)), max_size=300))
def test_a_record_stays_small_and_never_counts_less(writes: list[tuple[int, int]]) -> None:
    use, totals = WindowUse("2026-11-23", {}), {}
    for number, more in writes:
        name = str(number)
        totals[name] = totals.get(name, 0) + more
        use = use.with_own(name, "2026-11-23", totals[name])
        assert len(use.tokens) <= MAX_INCARNATIONS
        assert use.of_others("") >= sum(totals.values())
        assert use.of_others(name) == use.of_others("") - totals[name]
    if len(totals) <= MAX_INCARNATIONS:
        assert use.of_others("") == sum(totals.values())


async def test_what_counts_no_more_is_deleted() -> None:
    async with frontends(2) as mesh:
        here, there = mesh.running
        here.budgets.spend(KEY, 700, mesh.unix_s)
        await here.flush()
        for frontend in mesh.running:
            await mesh.hear(frontend)
            frontend._followed.is_heard = True
        mesh.unix_s += 10 * DAY_S
        assert await there.flush()
        assert (await mesh.store.range(BUDGETS_PREFIX)).entries == ()
        here._followed._take(key_of("alice"), None)
        await here.flush()
        await here.flush()
        assert (await mesh.store.range(BUDGETS_PREFIX)).entries == (), "nobody writes it again"


async def test_a_record_that_somebody_deletes_or_breaks_is_written_again(caplog: pytest.LogCaptureFixture) -> None:
    async with frontends(1) as mesh:
        (here,) = mesh.running
        here.budgets.spend(KEY, 700, mesh.unix_s)
        await here.flush()
        await mesh.hear(here)
        await mesh.store.put(key_of("alice"), b"half a rec")
        await mesh.hear(here)
        assert "cannot be used" in caplog.text
        assert here.budgets.used("alice", Period.DAY, NOON) == 700
        await mesh.store.delete(key_of("alice"))
        here._followed._take(key_of("alice"), None)
        await here.flush()
        anew = mesh.start()
        await mesh.hear(anew)
        assert anew.budgets.used("alice", Period.DAY, NOON) == 700


def test_too_many_tenants_and_counts_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.requests.key_budgets.MAX_TENANTS", 2)
    budgets = KeyBudgets("first")
    for name in ("a", "b"):
        assert budgets.has_room(name)
        budgets.spend(ApiKey(name, b"", tokens_per_day=10.0), 5, NOON)
    assert budgets.has_room("a")
    assert not budgets.has_room("c")
    record = BudgetRecord("c", {Period.DAY: WindowUse("2026-11-23", {"x": -1})})
    with pytest.raises(ConfigurationError, match="negative"):
        record.checked()


def test_what_is_left_is_shown_by_tenant_and_period() -> None:
    uses = {Period.DAY: WindowUse("2026-11-22", {"x": 900}), Period.MONTH: WindowUse("2026-11", {"x": 900, "y": 1700})}
    record = BudgetRecord("alice", uses, {Period.DAY: 1000.0, Period.MONTH: 2500.0})
    day, month = lines_of([record], NOON)
    assert (day.used, day.left, day.begins_anew) == (0, 1000.0, "2026-11-24T00:00:00Z")
    assert (month.used, month.left, month.begins_anew) == (2600, 0.0, "2026-12-01T00:00:00Z")


@pytest.mark.live
async def test_a_key_whose_budget_is_used_up_is_refused_until_the_next_window(model_path: Path, tmp_path: Path) -> None:
    key, line = new_key_line("alice", bytes(32), tokens_per_month=3.0)
    free, free_line = new_key_line("bob", b"b" * 32)
    (tmp_path / "keys").write_text(f"{line}\n{free_line}\n")
    body = {"model": "demo", "prompt": "some words of a prompt", "max_tokens": 1}
    async with (
        mesh_of_fakes(model_path, lambda _: tokens([70], [1]), api_keys_file=tmp_path / "keys") as mesh,
        mesh.http() as http,
    ):

        async def ask(key: str) -> Any:
            return await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        await mesh.until(lambda: mesh.service.budgets.is_heard)
        assert (await ask(key)).status_code == 200
        counted = mesh.service.budgets.budgets
        await mesh.until(lambda: counted.used("alice", Period.MONTH, mesh.service.unix_time()) >= 3)
        refused = await ask(key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert "3 tokens per month. It begins anew at" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert mesh.metric("budget_refusals_total", period="month") == 1
        assert (await ask(free)).status_code == 200
        async with asyncio.timeout(60.0):  # what is being written counts as written already
            while not (entries := (await mesh.store.range(BUDGETS_PREFIX)).entries):  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.01)
        (entry,) = entries
        assert b'"alice"' in entry.value
        mesh.service.budgets._followed.is_heard = False
        unknown = await ask(key)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "budget_unknown")
