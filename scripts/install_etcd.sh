#!/bin/sh
# Finds or installs an etcd for the tests: install_etcd.sh VENV. Without one they skip what needs it, so this fails in CI
# alone (CI=true).
set -u
venv=$1

if command -v etcd >/dev/null 2>&1; then
    echo "etcd: $(command -v etcd)"
    exit 0
fi
if [ -x "$venv/bin/etcd" ]; then
    echo "etcd: $venv/bin/etcd"
    exit 0
fi
give_up() {
    echo "etcd: none installed ($1); the tests that need it will be skipped" >&2
    [ "${CI:-}" != true ]
    exit
}
command -v apt-get >/dev/null 2>&1 || give_up "no apt-get here; put an etcd 3.4 or newer on PATH"

if [ "$(id -u)" = 0 ]; then
    apt-get update -q >/dev/null 2>&1 || echo "etcd: apt-get update failed, trying with the lists at hand" >&2
    if DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends etcd-server >/dev/null 2>&1; then
        echo "etcd: $(command -v etcd), installed by apt-get"
        exit 0
    fi
fi

# Without root, or where the package cannot be configured: unpack it, only the binary is needed.
scratch=$(mktemp -d) || give_up "no temporary directory"
trap 'rm -rf "$scratch"' EXIT
(cd "$scratch" && apt-get download -q etcd-server >/dev/null 2>&1) || give_up "apt-get knows no package etcd-server"
dpkg -x "$scratch"/etcd-server_*.deb "$scratch/root" 2>/dev/null || give_up "the package could not be unpacked"
mkdir -p "$venv/bin" && cp "$scratch/root/usr/bin/etcd" "$venv/bin/etcd" || give_up "cannot write $venv/bin"
"$venv/bin/etcd" --version >/dev/null 2>&1 || { rm -f "$venv/bin/etcd"; give_up "the binary does not run"; }
echo "etcd: $venv/bin/etcd, unpacked from the distribution's package"
