#!/usr/bin/env bash
# The libraries that tests/clients tries, in an environment of their own: bash scripts/install_clients.sh [FOLDER]
# Torch and transformers, which some of them want, are taken from the environment of this Python if they are there.
set -euo pipefail
folder=${1:-.clients}
python=${PYTHON:-.venv/bin/python}
test -x "$folder/bin/python" || "$python" -m venv --without-pip "$folder"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$own/zz_beside.pth"
for library in "openai anthropic" langchain-openai instructor "pydantic-ai-slim[openai]" "litellm mcp" "lm-eval[api]" guidellm; do
  # shellcheck disable=SC2086
  "$python" -m pip --python "$folder/bin/python" install -q $library || echo "$library cannot be installed: its checks fail"
done
if command -v npm > /dev/null; then
  npm install --silent --prefix "$folder" openai || echo "Node's openai cannot be installed: its checks fail"
fi
