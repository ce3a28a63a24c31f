"""The console as one HTML file that holds a recording, and opens without a server or a network."""

import binascii
import gzip
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

MAX_UNPACKED_BYTES: Final = 1 << 30
"""Of a page that is read again: far more than one ever holds."""
_MODULES: Final = ("dom", "charts", "table", "views", "autoscale", "requests", "feed", "compare", "replay")
"""Each behind those that it imports."""
_IMPORT: Final = re.compile(r'^import \{ ([^}]+) \} from "\./(\w+)\.js";$', re.MULTILINE)
_RECORDING: Final = re.compile(rb'<script type="application/gzip" id="recording">([A-Za-z0-9+/=]+)</script>')
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)


def single_page(assets: Mapping[str, bytes], recording: bytes) -> bytes:
    """`assets`: the files of the console, by name; `recording`: JSON, as `recorded.recording` makes it.

    The page's content security policy lets nothing run but what is in it, by its digest, and nothing be asked.
    """
    scripts = [assets["vendor/uplot/uPlot.iife.min.js"].decode(), _bundle(assets)]
    styles = [assets[name].decode() for name in ("vendor/uplot/uPlot.min.css", "console.css")]
    policy = (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    packed = b64encode(gzip.compress(recording, mtime=0)).decode()
    icon = b64encode(assets["icon.svg"]).decode()
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}" type="image/svg+xml">',
        *(f"<style>{style}</style>" for style in styles),
    ]
    tail = [
        f'<script type="application/gzip" id="recording">{packed}</script>',  # as `_RECORDING` finds it
        *(f"<script>{script}</script>" for script in scripts),
    ]
    page = assets["index.html"].decode()
    page = re.sub(r'^<(?:link|script) [^\n]*"console/assets/[^\n]*\n', "", page, flags=re.MULTILINE)
    page = page.replace("</head>", "\n".join((*head, "</head>")))
    return page.replace("</body>", "\n".join((*tail, "</body>"))).encode()


def recording_of(page: bytes) -> bytes | None:
    """What a page of `single_page` holds; None if it is no such page. Raises ValueError if it is damaged."""
    if (found := _RECORDING.search(page)) is None:
        return None
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        recording = unpacker.decompress(b64decode(found[1], validate=True), MAX_UNPACKED_BYTES)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"its recording is damaged: {error}") from None
    if not unpacker.eof:
        raise ValueError("its recording is cut off, or larger than 1 GiB")
    return recording


def _bundle(assets: Mapping[str, bytes]) -> str:
    """The modules as one classic script, each a function with names of its own: inline modules cannot import others."""
    parts = ['"use strict";', "const modules = {};"]
    for name in _MODULES:
        source = assets[f"{name}.js"].decode()
        exported = _EXPORT.findall(source)
        source = _IMPORT.sub(r'const { \1 } = modules["\2"];', _EXPORT.sub("", source))
        parts.append(f'modules["{name}"] = (() => {{\n{source}\nreturn {{ {", ".join(exported)} }};\n}})();')
    text = "(() => {\n" + "\n".join(parts) + "\n})();\n"
    assert "</script" not in text, "the script would end there"
    return text


def _digests(texts: list[str]) -> str:
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
