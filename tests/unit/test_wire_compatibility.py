"""What processes of the former release and of this one tell each other is understood by both."""

import json
from pathlib import Path

import pytest

from scripts.wire_compatibility import RECORD, ROOT, breaks, describe

pytestmark = pytest.mark.live

FORMER = """
syntax = "proto3";
package p;
enum Kind { NONE = 0; ONE = 1; TWO = 2; }
message Asked { string name = 1; repeated uint32 tokens = 2; Kind kind = 3; reserved 9; }
message Answered { uint64 count = 1; }
service Calls { rpc Ask(Asked) returns (stream Answered); }
"""


def test_messages_of_the_former_release_are_understood() -> None:
    found = breaks(json.loads(RECORD.read_text("utf-8")), describe(ROOT / "protos"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("string name = 1;", "bytes name = 1;", "field 1 was string name and is bytes name"),
        ("repeated uint32 tokens = 2;", "uint32 tokens = 2;", "field 2 was repeated uint32 tokens"),
        ("string name = 1;", "", "write `reserved 1;`"),
        ("string name = 1;", "string name = 12;", "write `reserved 1;`"),
        ("reserved 9;", "bool late = 9;", "field 9 is used again"),
        ("TWO = 2;", "", "value 2 is gone"),
        ("returns (stream Answered)", "returns (Answered)", "Calls/Ask was"),
        ("rpc Ask(Asked) returns (stream Answered);", "", "Calls/Ask is gone"),
        ("message Answered", "message Said", ".p.Answered is gone"),
    ],
)
def test_what_would_be_misread_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in FORMER
    changed = FORMER.replace(old, new)
    if new == "message Said":
        changed = changed.replace("(stream Answered)", "(stream Said)")
    found = breaks(_described(tmp_path / "former", FORMER), _described(tmp_path / "now", changed))
    assert any(told in line for line in found), found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Kind kind = 3;", "Kind kind = 3; string more = 4;"),
        ("string name = 1;", "string title = 1;"),
        ("string name = 1;", "reserved 1;"),
        ("TWO = 2;", "TWO = 2; THREE = 3;"),
        ("service Calls {", "service Calls { rpc Again(Asked) returns (Answered);"),
    ],
)
def test_what_is_added_or_renamed_breaks_nothing(tmp_path: Path, old: str, new: str) -> None:
    assert old in FORMER
    changed = FORMER.replace(old, new)
    assert not breaks(_described(tmp_path / "former", FORMER), _described(tmp_path / "now", changed))


def _described(folder: Path, text: str) -> dict[str, object]:
    folder.mkdir()
    (folder / "p.proto").write_text(text)
    return describe(folder)
