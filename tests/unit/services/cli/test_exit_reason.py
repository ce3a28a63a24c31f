"""Why a process ended, read from its log."""

import json

from hypothesis import given
from hypothesis import strategies as st

from services.cli.supervisor.launcher import exit_reason


def test_the_last_error_counts_not_what_was_said_after_it() -> None:
    lines = [
        {"level": "error", "message": "an older one", "error": "old"},
        {"level": "error", "message": "the role cannot run with its settings", "error": "'foo' is no setting"},
        {"level": "info", "message": "ended"},
    ]
    assert exit_reason("\n".join(map(json.dumps, lines))) == "'foo' is no setting"


def test_of_a_traceback_the_error_alone_is_told() -> None:
    record = {
        "level": "error",
        "message": "the role cannot run",
        "traceback": "Traceback\n  x\nmesh.errors.Bad: out: 3",
    }
    assert exit_reason(json.dumps(record)) == "Bad: out: 3"


def test_what_the_command_line_says_of_options_is_understood() -> None:
    assert exit_reason("Usage: penstock serve\n\nError: Invalid value for '--x': 'abc'\n") == (
        "Invalid value for '--x': 'abc'"
    )
    assert exit_reason("penstock: no such file\n") == "no such file"


def test_a_log_without_errors_has_no_reason() -> None:
    assert exit_reason('{"level": "info", "message": "serving"}\n[1, 2]\nnull\n') == ""


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert isinstance(exit_reason(text), str)
