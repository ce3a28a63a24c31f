"""What a page that a command has written holds."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any


def recorded(page: Path) -> dict[str, Any]:
    packed = page.read_text().partition('id="recording">')[2].partition("<")[0]
    document: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return document
