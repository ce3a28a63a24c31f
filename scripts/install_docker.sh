#!/usr/bin/env bash
# A Docker engine with Compose, and the images that deploy/Dockerfile.* begin with. What is there is left as it is.
set -euo pipefail

if ! command -v docker >/dev/null; then
    [ "$(id -u)" = 0 ] || { echo "install Docker with Compose, or run this as root" >&2; exit 1; }
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends docker.io docker-compose iptables
fi
if ! docker info >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || { echo "no Docker engine answers; start it" >&2; exit 1; }
    log=$(mktemp)
    nohup dockerd >"$log" 2>&1 &
    for _ in $(seq 100); do
        docker info >/dev/null 2>&1 && break
        sleep 0.2
    done
    docker info >/dev/null 2>&1 || { tail -20 "$log" >&2; exit 1; }
    echo "dockerd runs until it is ended; its log is $log"
fi

missing=()
for image in python:3.11-slim debian:bookworm-slim; do
    docker image inspect "$image" >/dev/null 2>&1 || timeout 120 docker pull -q "$image" || missing+=("$image")
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "no registry gave ${missing[*]}: making them of Debian's packages, which takes some minutes"
command -v debootstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends debootstrap
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv bookworm "$root" >"$root.log" 2>&1 ||
    { tail -20 "$root.log" >&2; exit 1; }
ln -s python3 "$root/usr/bin/python"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
# This machine's own authorities and package sources, by which it reaches the indexes.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
for image in "${missing[@]}"; do
    tar -C "$root" -c . | docker import --change "CMD [\"bash\"]" - "$image" >/dev/null
done
