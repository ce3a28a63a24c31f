"""Tables that never cut a word, in terminals of any width: names cut short would not tell instances apart."""

import sys
from collections.abc import Iterator, Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

WIDTH_WITHOUT_TERMINAL: Final = 160
"""A pipe has no width of its own."""


def output_console() -> Console:
    """Of stdout, as wide as its terminal. `:a:` is a name there, and no picture."""
    return Console(emoji=False) if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL, emoji=False)


def print_table(table: Table) -> None:
    """Print it to stdout."""
    console = output_console()
    console.print(fitted(table, console.width))


def fitted(table: Table, width: int) -> Table | Group:
    """The table with each of its words whole: without lines between columns where it would be too wide with them, and
    as a paragraph for each row where it would be so all the same."""
    texts = [[_text(cell) for cell in (column.header, *column.cells)] for column in table.columns]
    longest = [max(map(_longest_word, of_column)) for of_column in texts]
    whole = [max(map(_longest_line, of_column)) for of_column in texts]
    with_lines, without = 3 * len(texts) + 1, len(texts)
    if sum(longest) + without > width:
        return Group(*_paragraphs(table))
    between = with_lines if sum(longest) + with_lines <= width else without
    if between == without:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    # Rich itself takes from all columns alike, and cuts words in one while another one has room.
    for column, characters in zip(table.columns, _shared(longest, whole, width - between), strict=True):
        column.width = characters
    return table


def _shared(longest: Sequence[int], whole: Sequence[int], width: int) -> list[int]:
    """Widths of columns of at least their longest words, the rest shared out up to what shows them in one line."""
    widths, free = list(longest), width - sum(longest)
    in_turn = sorted(range(len(widths)), key=lambda index: whole[index] - longest[index])
    for taken, index in enumerate(in_turn):
        more = min(whole[index] - longest[index], free // (len(in_turn) - taken))
        widths[index] += more
        free -= more
    return widths


def _paragraphs(table: Table) -> Iterator[Text]:
    if table.title:
        yield _text(table.title)
    for row, cells in zip(table.rows, zip(*(column.cells for column in table.columns), strict=True), strict=True):
        named = ((_text(column.header).plain, _text(cell)) for column, cell in zip(table.columns, cells, strict=True))
        said = [Text(" ").join((Text(name), cell)) if name else cell for name, cell in named if cell.plain]
        if not said:
            continue
        said[0].stylize("bold")
        yield Text.assemble(Text(", ").join(said), style=str(row.style or ""))
    if table.caption:
        yield _text(table.caption)


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell), emoji=False)


def _longest_word(text: Text) -> int:
    return max(map(cell_len, text.plain.split()), default=0)


def _longest_line(text: Text) -> int:
    return max(map(cell_len, text.plain.splitlines()), default=0)
