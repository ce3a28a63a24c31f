"""Tables in terminals of 80 columns and of others: no word is cut, whatever stands in them."""

import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from services.cli.cascade import _table as cascades_table
from services.cli.profile import COLUMNS as PROFILE_COLUMNS
from services.cli.rank_status import ranks_table
from services.cli.terminal_table import fitted
from tests.examples import examples

WORDS = st.text("abcdef.:-_%", min_size=1, max_size=14)
CELLS = st.lists(WORDS, max_size=3).map(" ".join)


def drawn(table: Table, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, emoji=False).print(fitted(table, width))
    return out.getvalue()


def made(columns: tuple[str, ...], *rows: tuple[str, ...]) -> Table:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    return table


def explained() -> Table:
    """As `penstock explain` has it with pools and a decode instance."""
    parts = ("wait_ms", "prefill_ms", "decode_ms", "others_ms", "pull_ms", "host_ms")
    row = ("demo-large-0", "1234.56", *("123.456" for _ in parts), "prefill to decode", "12.34", "chosen")
    return made(
        ("instance", "score", *parts, "pool", "decode score", ""), row, ("demo-large-1", *row[1:-1], "draining")
    )


def ranks() -> Table:
    rank = {"core": 0, "rank": 0, "port": 7300, "pulling": 1, "serving": 2, "exported_blocks": 33}
    rank |= {"pulls_total": "44", "failed_pulls_total": "5", "pulled_bytes_total": "6000000"}
    states = [{**rank, "obstacle": ""}, {**rank, "obstacle": "its KV transfer agent does not answer"}]
    table = ranks_table([{"instance_id": "demo-large-0", "tensor_parallel": "2", "ranks": states}])
    assert table is not None
    return table


def cascades() -> Table:
    cascade = {"plan_revision": "3", "name": "penstock-cascade", "tiers": ["demo-small", "demo-medium", "demo-large"]}
    cascade |= {"thresholds": [87.5, 93.25], "judges": ["confidence"], "without_judge": "accept"}
    return cascades_table([{**cascade, "label": "endpoint:judge@http://127.0.0.1:8000"}])


PROFILE = ("simulated", "demo-large", "cpu-x86_64", "8", "3.1 % (6.2 %)", "2 %", "12.3", "4")
REPLAY = ("day", "by", "replica-hours", "of hindsight", "within the SLO", "replicas", "changes")
WIDEST = {
    "explain": explained(),
    "status": ranks(),
    "cascade": cascades(),
    "profile": made(PROFILE_COLUMNS, PROFILE),
    "autoscale replay": made(REPLAY, ("1", "utilisation", "268.2", "1.052", "99.19 %", "3 to 12", "122")),
    "regret": made(("trace", "KV", "load", *(f"least_loaded_{n}" for n in range(9))), ("chat", *("12 ±3",) * 11)),
}


@pytest.mark.parametrize("name", WIDEST)
def test_the_widest_tables_fit_80_columns_with_every_word_whole(name: str) -> None:
    table = WIDEST[name]
    texts = [Text.from_markup(str(cell)).plain for column in table.columns for cell in (column.header, *column.cells)]
    shown = drawn(table, 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    shown_words = {word.rstrip(",") for word in shown.translate(str.maketrans("│┃", "  ")).split()}
    assert {word.rstrip(",") for text in texts for word in text.split()} <= shown_words


@settings(max_examples=examples(60))
@given(st.lists(st.lists(CELLS, min_size=4, max_size=4), min_size=1, max_size=3), st.integers(20, 120))
@example([["", "", "", ":a:"]], 20)  # which rich takes for a picture
def test_no_word_is_cut_at_any_width(rows: list[list[str]], width: int) -> None:
    shown = drawn(made(("name", "of", "what", "how many"), *(tuple(map(escape, row)) for row in rows)), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    assert all(word in shown for row in rows for cell in row for word in cell.split())


def test_lines_between_columns_go_first_and_then_the_columns() -> None:
    table = made(("instance", "score", ""), ("demo-large-0", "12.5", "chosen"), ("demo-large-1", "-", ""))
    assert "│ demo-large-0 │ 12.5  │ chosen │" in drawn(table, 40)
    assert drawn(table, 26).splitlines()[1].split() == ["demo-large-0", "12.5", "chosen"]
    assert (
        "".join(drawn(table, 22)).split()
        == "instance demo-large-0, score 12.5, chosen instance demo-large-1, score -".split()
    )
