#!/bin/sh
# Puts mermaid, which draws the pictures of the documentation, to where scripts/docs_hooks.py takes it from:
# install_mermaid.sh VENV. It is in the site, so that the pictures show without the internet. The file is that of mermaid's
# own npm package, by its digest; this wheel holds it unchanged, and pip is all that is needed to have it.
set -eu
package=artoo-mermaid
file=artoo_mermaid/assets/mermaid.min.js
digest=74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b
venv=$1
lock=${LOCK:-$(dirname "$0")/../requirements/lock.txt}
target=$venv/share/mermaid/mermaid.min.js

is_right() {
    echo "$digest  $1" | sha256sum --check --status 2>/dev/null
}
is_right "$target" && exit 0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Nothing of the wheel is run, so what it says of Python does not matter.
"$venv/bin/python" -m pip download -q --no-deps --only-binary :all: --python-version 3.12 -c "$lock" \
    -d "$scratch" "$package"
"$venv/bin/python" -m zipfile -e "$scratch"/*.whl "$scratch"
is_right "$scratch/$file" || { echo "mermaid: $package does not hold the file that was expected" >&2; exit 1; }
mkdir -p "$(dirname "$target")"
mv "$scratch/$file" "$target"
