"""What uneven contexts cost: read from a table, fitted to measurements, and used by the cost models."""

import gzip
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import ConfigurationError
from simulator.cost.catalogue import instance_for
from simulator.cost.catalogue.unevenness import UNEVENNESS
from simulator.cost.fitted.unevenness import MeasuredUnevenness, UnevennessTable, UnevenRow, fit_unevenness
from simulator.cost.model import BatchShape, PrefillChunk
from simulator.cost.roofline.lengths import DecodeLengths
from simulator.profiles.folder import ProfileFolder
from simulator.profiles.skew_tables import uneven_rows

TABLE = UnevennessTable(
    100, (4.0, 16.0, 1024.0), (100.0, 1000.0), ((0.0, 0.2), (0.1, 0.3), (0.5, 0.1)), (0.01, 0.02, 0.08)
)
CONTEXTS = st.lists(st.integers(1, 20_000), min_size=1, max_size=200)


def lengths_of(contexts: list[int]) -> DecodeLengths:
    return DecodeLengths.of_step(np.array(contexts, dtype=np.int64), sum(contexts))


def decodes(contexts: list[int], *chunks: PrefillChunk) -> BatchShape:
    return BatchShape(chunks, np.array(contexts, dtype=np.int64), sum(contexts))


def test_a_table_is_met_at_its_points_and_stays_level_outside() -> None:
    unevenness = MeasuredUnevenness(TABLE, kv_heads=4, multiprocessors=100)
    # 4 requests x 4 heads are 16 tiles; the mean is 1000 and the longest 2.5 times as long.
    assert unevenness.stretch(lengths_of([500, 500, 500, 2500])) == pytest.approx(1 + 0.3 * 1.5)
    assert unevenness.stretch(lengths_of([5, 5, 5, 25])) == pytest.approx(1 + 0.1 * 1.5)
    assert unevenness.stretch(lengths_of([50_000, 50_000, 50_000, 250_000])) == pytest.approx(1 + 0.3 * 1.5)
    assert unevenness.beside_prompt_ms(lengths_of([500, 500, 500, 2500]), 1.0) == pytest.approx(0.02 * 1500 / 1000)
    # 2 of 4 heads: 8 tiles, half way between 4 and 16 by their logarithms.
    assert MeasuredUnevenness(TABLE, 2, 100).stretch(lengths_of([500, 500, 500, 2500])) == pytest.approx(1 + 0.25 * 1.5)
    # A card with four times the multiprocessors has as much for each as this one has with a quarter of the tiles.
    assert MeasuredUnevenness(TABLE, 4, 400).stretch(lengths_of([500, 500, 500, 2500])) == pytest.approx(1 + 0.2 * 1.5)


@settings(deadline=None)
@given(contexts=CONTEXTS, steps=st.integers(1, 40))
def test_a_run_is_its_steps_and_equal_contexts_are_not_stretched(contexts: list[int], steps: int) -> None:
    unevenness = MeasuredUnevenness(UNEVENNESS["RTX-PRO-6000"], 8, 188)
    run = unevenness.stretch(lengths_of(contexts).run(steps))
    assert run.tolist() == [unevenness.stretch(lengths_of([each + step for each in contexts])) for step in range(steps)]
    assert (run >= 1 - 1e-9).all()
    assert unevenness.stretch(lengths_of([contexts[0]] * len(contexts))) == pytest.approx(1.0)


@settings(deadline=None, max_examples=30)
@given(contexts=CONTEXTS, steps=st.integers(1, 20))
def test_a_roofline_with_measured_unevenness_runs_as_its_steps(contexts: list[int], steps: int) -> None:
    _, cost = instance_for("Llama-3.1-8B", "RTX-PRO-6000")
    shape = decodes(contexts)
    expected = [cost.step_ms(shape.decode_only_after(step)) for step in range(steps)]
    assert cost.decode_run_ms(shape, steps).tolist() == expected


def test_a_card_with_measurements_has_them_and_another_is_given_them() -> None:
    mixed, level = [400] * 60 + [8000] * 4, [875] * 64
    chunk = PrefillChunk(512, 0)
    costs = {
        name: instance_for("Llama-3.1-8B", device, heterogeneity=heterogeneity, unevenness=table)[1]
        for name, device, heterogeneity, table in (
            ("measured", "RTX-PRO-6000", True, None),
            ("levelled", "RTX-PRO-6000", False, None),
            ("rule", "H20", True, None),
            ("given", "H20", True, UNEVENNESS["RTX-PRO-6000"]),
        )
    }
    for chunks in ((), (chunk,)):
        assert costs["measured"].step_ms(decodes(mixed, *chunks)) > costs["levelled"].step_ms(decodes(mixed, *chunks))
        assert costs["measured"].step_ms(decodes(level, *chunks)) == costs["levelled"].step_ms(decodes(level, *chunks))
        assert costs["given"].step_ms(decodes(mixed, *chunks)) != costs["rule"].step_ms(decodes(mixed, *chunks))


def rows_of(table: UnevennessTable) -> list[UnevenRow]:
    """What would be measured where the table held exactly."""
    rows = []
    for requests in (2, 8, 32, 128, 512):
        for longer in {1, requests // 2}:
            for short in (64, 200, 700, 3000, 6000):
                row = UnevenRow(2, requests, longer, short, 5 * short, False, 50.0, 0.0)
                unevenness = MeasuredUnevenness(table, row.kv_heads, table.multiprocessors)
                lengths = lengths_of([5 * short] * longer + [short] * (requests - longer))
                rows.append(replace(row, uneven_us=50.0 * unevenness.stretch(lengths)))
                beside_us = 1000 * unevenness.beside_prompt_ms(lengths, 0.0)
                rows.append(replace(row, has_prompt=True, equal_us=200.0, uneven_us=200.0 + beside_us))
    return rows


def test_a_fit_finds_what_its_rows_were_made_with() -> None:
    made = UNEVENNESS["RTX-PRO-6000"]
    rows = rows_of(made)
    table = fit_unevenness(rows, 188)
    for row in rows:
        unevenness = MeasuredUnevenness(table, row.kv_heads, 188)
        lengths = lengths_of([row.long_tokens] * row.longer + [row.short_tokens] * (row.requests - row.longer))
        if row.has_prompt:
            found_us = row.equal_us + 1000 * unevenness.beside_prompt_ms(lengths, 0.0)
        else:
            found_us = row.equal_us * unevenness.stretch(lengths)
        assert found_us == pytest.approx(row.uneven_us, rel=0.002)


def test_what_was_not_measured_is_as_at_its_neighbour() -> None:
    rows = [row for row in rows_of(UNEVENNESS["RTX-PRO-6000"]) if row.requests in (8, 32)]
    table = fit_unevenness(rows, 188)
    assert table.beside_prompt_us[0] == table.beside_prompt_us[1] == table.beside_prompt_us[2] > 0
    assert table.stretch[-1] == table.stretch[-2] == table.stretch[-3]


def test_rows_of_one_kind_alone_are_refused() -> None:
    rows = [row for row in rows_of(TABLE) if row.has_prompt]
    with pytest.raises(ConfigurationError, match="both"):
        fit_unevenness(rows, 188)


def test_a_table_with_holes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a row for each number of tiles"):
        msgspec.structs.replace(TABLE, tiles=(4.0, 16.0))
    with pytest.raises(ConfigurationError, match="increase"):
        msgspec.structs.replace(TABLE, mean_tokens=(1000.0, 100.0))


def test_published_rows_are_read(tmp_path: Path) -> None:
    text = (
        "model,tp,n,nb,pc,kvs,kv_big,t_mean_us,t_skew_us\n"
        "meta-llama/Llama-3.1-8B,tp2,8,1,16,128,512,40.5,44.5\n"
        "somebody/else,tp1,8,1,0,128,512,40.5,44.5\n"
    )
    (tmp_path / "llmservingsim_skew_RTXPRO6000.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert uneven_rows(ProfileFolder(tmp_path), "RTX-PRO-6000") == {
        "Llama-3.1-8B": [UnevenRow(4, 8, 1, 128, 512, True, 40.5, 44.5)]
    }
