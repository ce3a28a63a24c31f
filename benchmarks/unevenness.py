"""How much longer attention over uneven contexts takes: by a fit to measurements, by the kernel's rule, not at all.

    python -m benchmarks.unevenness --data DIR [--device RTX-PRO-6000] [--every 8] [--json OUT]

Each model's rows are judged by what is fitted to the other models'. Errors are of the time of the uneven batch, where
that of the equal one is known. Of the many rows with a prompt beside the decodes one in `--every` is taken. The table
that is fitted to all of them stands in OUT, and in `simulator/cost/catalogue/unevenness.py`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulator.cost.catalogue import DEVICES, MODELS
from simulator.cost.fitted.unevenness import MeasuredUnevenness, Unevenness, UnevennessTable, UnevenRow, fit_unevenness
from simulator.cost.roofline.attention import decode_attention
from simulator.cost.roofline.lengths import DecodeLengths
from simulator.profiles.folder import ProfileFolder
from simulator.profiles.skew_tables import uneven_rows
from simulator.reproductions.page import markdown_table

Contexts = tuple[int, int, int, int, int]
"""KV heads, requests, how many of them are longer, and the two lengths."""


class Errors(msgspec.Struct, frozen=True):
    """Of some rows, relative to what was measured."""

    model: str
    step: str
    by: str
    rows: int
    mean_absolute: float
    p95_absolute: float
    mean: float


class Found(msgspec.Struct, frozen=True):
    """What is written to OUT."""

    errors: tuple[Errors, ...]
    table: UnevennessTable


def main() -> None:
    """Print the errors; with --json, keep them and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder whose profiles/ has llmservingsim_skew_CARD.csv.gz"
    )
    parser.add_argument("--device", default="RTX-PRO-6000", choices=list(DEVICES))
    parser.add_argument("--every", type=int, default=8, help="of the rows with a prompt")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = {
        model: _thinned(of_model, arguments.every)
        for model, of_model in uneven_rows(ProfileFolder(arguments.data), arguments.device).items()
    }
    multiprocessors = DEVICES[arguments.device].multiprocessors
    errors: list[Errors] = []
    for model, judged in rows.items():
        others = [row for other, of_model in rows.items() if other != model for row in of_model]
        table = fit_unevenness(others, multiprocessors)
        errors += _errors(model, judged, table, arguments.device)
    table = fit_unevenness([row for of_model in rows.values() for row in of_model], multiprocessors)
    if arguments.json is not None:
        encoded = msgspec.json.encode(Found(tuple(errors), table))
        arguments.json.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    header = ("left out", "step", "by", "rows", "mean absolute error", "p95", "mean error")
    print(markdown_table(header, [_row(each) for each in errors]))


def _thinned(rows: list[UnevenRow], every: int) -> list[UnevenRow]:
    return [row for row in rows if not row.has_prompt] + [row for row in rows if row.has_prompt][::every]


def _errors(model: str, rows: Sequence[UnevenRow], table: UnevennessTable, device: str) -> list[Errors]:
    found = []
    alone_us = {_contexts(row): row.equal_us for row in rows if not row.has_prompt}
    for step, judged in (
        ("decodes only", [row for row in rows if not row.has_prompt]),
        ("with a prompt", [row for row in rows if row.has_prompt and _contexts(row) in alone_us]),
    ):
        measured = np.array([row.uneven_us for row in judged])
        by = {
            "the fit": [_uneven_us(_fit(table, row), row, alone_us) for row in judged],
            "the rule": [_uneven_us(_rule(model, device, row), row, alone_us) for row in judged],
            "nothing": [row.equal_us for row in judged],
        }
        for name, predicted in by.items():
            error: NDArray[np.float64] = np.array(predicted) / measured - 1
            absolute = np.abs(error)
            found.append(
                Errors(
                    model,
                    step,
                    name,
                    len(judged),
                    float(absolute.mean()),
                    float(np.percentile(absolute, 95)),
                    float(error.mean()),
                )
            )
    return found


def _fit(table: UnevennessTable, row: UnevenRow) -> Unevenness:
    return MeasuredUnevenness(table, row.kv_heads, table.multiprocessors)


def _rule(model: str, device: str, row: UnevenRow) -> Unevenness:
    return decode_attention(MODELS[model], DEVICES[device], MODELS[model].kv_heads // row.kv_heads)


def _contexts(row: UnevenRow) -> Contexts:
    return row.kv_heads, row.requests, row.longer, row.short_tokens, row.long_tokens


def _uneven_us(unevenness: Unevenness, row: UnevenRow, alone_us: Mapping[Contexts, float]) -> float:
    """`alone_us`: of equal contexts without a prompt, which is where the rule begins."""
    contexts = [row.long_tokens] * row.longer + [row.short_tokens] * (row.requests - row.longer)
    lengths = DecodeLengths.of_step(np.array(contexts, dtype=np.int64), sum(contexts))
    if not row.has_prompt:
        return float(row.equal_us * unevenness.stretch(lengths))
    return row.equal_us + 1000 * unevenness.beside_prompt_ms(lengths, alone_us[_contexts(row)] / 1000)


def _row(errors: Errors) -> tuple[str, ...]:
    return (
        errors.model,
        errors.step,
        errors.by,
        str(errors.rows),
        f"{errors.mean_absolute:.1%}",
        f"{errors.p95_absolute:.1%}",
        f"{errors.mean:+.1%}",
    )


if __name__ == "__main__":
    main()
