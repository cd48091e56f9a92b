#!/usr/bin/env bash
# Installs the Python tools that own the formats (by package name, versions pinned) into a cache folder, and runs
# run.py with the dsq that cargo built. Extra arguments go to run.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/dsq"
venv="$cache/conformance"
target="${CARGO_TARGET_DIR:-target}"
if ! cmp -s tests/conformance/requirements.txt "$venv/installed.txt"; then
    python3 -m venv --clear "$venv"
    # llama-cpp-python builds llama.cpp from source; without it the checks that need it are skipped.
    grep -v '^llama-cpp-python' tests/conformance/requirements.txt > "$venv/wanted.txt"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$venv/wanted.txt"
    cp tests/conformance/requirements.txt "$venv/installed.txt"
fi
# Source archives only: their packing functions run by themselves (column_peers.py). Without them these checks are skipped.
peers="$cache/peers"
if [ ! -d "$peers" ]; then
    mkdir -p "$peers.new"
    if "$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary :all: -d "$peers.new" \
        gptqmodel==7.7.0 autoawq==0.2.9; then
        mv "$peers.new" "$peers"
    fi
fi
exec "$venv/bin/python" tests/conformance/run.py --dsq "$target/release/dsq" --image-logits "$target/release/examples/image_logits" --peers "$peers" "$@"
