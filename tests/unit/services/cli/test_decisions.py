"""`penstock decisions` does not call nothing a success."""

from pathlib import Path

from click.testing import CliRunner

from mesh.errors import ConfigurationError
from services.cli.decisions import command


def test_an_empty_recording_has_nothing_to_compare(tmp_path: Path) -> None:
    recording = tmp_path / "decisions.jsonl"
    recording.touch()
    result = CliRunner().invoke(command, [str(recording)])
    assert isinstance(result.exception, ConfigurationError)
    assert "no decision" in str(result.exception)
