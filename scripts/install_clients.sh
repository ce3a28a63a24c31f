#!/usr/bin/env bash
# The libraries that tests/clients tries, in an environment of their own: bash scripts/install_clients.sh [FOLDER]
# Torch and transformers, which some of them want, are taken from the environment of this Python if they are there.
# NEWEST=1 does without requirements/lock-clients.txt, and writes it (`make lock-clients`).
set -euo pipefail
folder=${1:-.clients}
python=${PYTHON:-.venv/bin/python}
requirements=$(dirname "$0")/../requirements
test -x "$folder/bin/python" || "$python" -m venv --without-pip "$folder"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$own/zz_beside.pth"
pip() { "$python" -m pip --python "$folder/bin/python" "$@"; }
if [ -n "${NEWEST:-}" ]; then
  grep -v '^#' "$requirements/clients.txt" | while read -r library; do
    # shellcheck disable=SC2086 # no lock: this finds the versions that it is written with
    pip install -q $library || echo "$library cannot be installed: its checks fail"
  done
  {
    echo "# Written by \`make lock-clients\`: what scripts/install_clients.sh installs beside requirements/lock.txt."
    echo "# It is installed without what it asks for (\`--no-deps\`), since no set of versions suits all of these libraries."
    echo "# For Python 3.11 on Linux x86_64."
    pip freeze --path "$own" | sed 's/+[^ ]*$//' | sort -f
  } > "$requirements/lock-clients.txt"
else
  pip install -q --no-deps -r "$requirements/lock-clients.txt" || echo "the clients cannot be installed: their checks fail"
fi
if command -v npm > /dev/null; then
  npm install --silent --prefix "$folder" openai@6.49.0 || echo "Node's openai cannot be installed: its checks fail"
fi
