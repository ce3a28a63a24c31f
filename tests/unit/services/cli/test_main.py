"""What goes wrong is one line and an exit status, never a traceback."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh.errors import ConfigurationError, StoreUnavailable
from services.cli import main as cli


def _run(monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.penstock, "main", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigurationError("set it right"), 2),
        (StoreUnavailable("is it running?"), 1),
        (PermissionError(13, "Permission denied", "/somewhere/out.json"), 1),
    ],
)
def test_each_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    assert _run(monkeypatch, error) == status
    told = capsys.readouterr().err
    assert told.startswith("penstock: ")
    assert told.count("\n") == 1


def test_a_file_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="directory") as failure:
        (tmp_path / "none" / "out.json").write_bytes(b"")
    assert _run(monkeypatch, failure.value) == 1
    assert str(tmp_path / "none" / "out.json") in capsys.readouterr().err


def test_other_operating_system_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise OSError("something unforeseen")

    monkeypatch.setattr(cli.penstock, "main", fail)
    with pytest.raises(OSError, match="unforeseen"):
        cli.main()


@pytest.mark.live
def test_the_version_says_the_commit() -> None:
    result = CliRunner().invoke(cli.penstock, ["--version"])
    assert result.exit_code == 0
    assert re.fullmatch(r"penstock \d+\.\d+\.\d+\S* \(commit ([0-9a-f]{12}(-dirty)?|unknown)\)\n", result.output)
