"""What mkdocs is told besides mkdocs.yml: pages that are generated, and pages and files that lie outside of docs/.

README.md is the first page. Links are written for those who read the files where they lie, and made to fit here.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from docs_reference import command_reference, grpc_reference, python_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
INDEX = "index.md"
MERMAID = "assets/javascripts/mermaid.min.js"
MERMAID_INSTALLED = Path(sys.prefix) / "share" / "mermaid" / "mermaid.min.js"
"""By scripts/install_mermaid.sh."""
OUTSIDE = {
    INDEX: "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "benchmarks/README.md": "benchmarks/README.md",
    "demo/README.md": "demo/README.md",
}
"""Where each of these pages is in the site, and in the repository."""
GENERATED = {
    "reference/commands.md": command_reference,
    "reference/grpc.md": grpc_reference,
    "reference/python.md": python_reference,
}
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)#\s]+)(?P<after>(?:#[^)\s]*)?\))")
_LIST_BEHIND_TEXT = re.compile(r"(?m)^(?P<text>(?![-*|#>]|\d+\. |\s|<).+\n)(?=(?:[-*]|1\.) )")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not lie in docs/, and the files that any page links to."""
    for at, path in OUTSIDE.items():
        files.append(File.generated(config, at, content=(ROOT / path).read_text("utf-8")))
    for at, make in GENERATED.items():
        files.append(File.generated(config, at, content=make()))
    for file in list(files.documentation_pages()):
        source = _source(file.src_uri)
        for link in _LINK.finditer(file.content_string):
            path = _linked(source, link["target"])
            at = _place(path)
            if at not in files.src_uris and not at.endswith(".md") and (ROOT / path).is_file():
                files.append(File.generated(config, at, abs_src_path=str(ROOT / path)))
    if not MERMAID_INSTALLED.is_file():
        raise PluginError(f"{MERMAID_INSTALLED} is missing, which draws the pictures: `make docs` installs it")
    files.append(File.generated(config, MERMAID, abs_src_path=str(MERMAID_INSTALLED)))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Pages with pictures bring what draws them: the theme would fetch it from a server, unless it is there before."""
    if 'class="mermaid"' not in output:
        return output
    at = relpath(MERMAID, PurePosixPath(page.file.dest_uri).parent)
    before, body, after = output.rpartition("<script src=")
    assert body, "the theme's own script is the last one"
    return f'{before}<script src="{at}"></script>{body}{after}'


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links between pages of the repository links between pages of the site; let a list follow a line of text, as
    on GitHub."""
    source = _source(page.file.src_uri)
    here = PurePosixPath(page.file.src_uri).parent

    def fit(link: re.Match[str]) -> str:
        if "://" in link["target"]:
            return link[0]
        return f"{link['before']}{relpath(_place(_linked(source, link['target'])), here)}{link['after']}"

    return _outside_of_code(markdown, lambda text: _LIST_BEHIND_TEXT.sub(r"\g<text>\n", _LINK.sub(fit, text)))


def _source(at: str) -> str:
    """The path in the repository of what is at `at` in the site."""
    return OUTSIDE.get(at, f"docs/{at}")


def _linked(source: str, target: str) -> str:
    """The path in the repository that a link of `source` means."""
    return normpath(str(PurePosixPath(source).parent / target))


def _place(path: str) -> str:
    """Where the file of the repository is in the site."""
    for at, outside in OUTSIDE.items():
        if path == outside:
            return at
    return path.removeprefix("docs/") if path.startswith("docs/") else path


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = re.split(r"(?ms)(^```.*?^```$)", markdown)
    return "".join(part if part.startswith("```") else change(part) for part in parts)
