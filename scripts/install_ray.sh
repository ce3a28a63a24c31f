#!/usr/bin/env bash
# Ray for `make test-ray`, in an environment of its own that sees all of another one: install_ray.sh ENVIRONMENT FOLDER.
set -eu
environment=$1
folder=$2
lock=${LOCK:-$(dirname "$0")/../requirements/lock.txt}

packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if [ ! -x "$folder/bin/ray" ]; then
    "$environment/bin/python" -m venv "$folder"
    echo "import site; site.addsitedir('$(packages "$environment")')" >"$(packages "$folder")/of_penstock.pth"
    "$folder/bin/python" -m pip install -q -c "$lock" 'ray>=2.60'
fi
