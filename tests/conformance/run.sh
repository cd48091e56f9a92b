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
    # llama-cpp-python below: it is built from source, or left out.
    grep -v '^llama-cpp-python' tests/conformance/requirements.txt > "$venv/wanted.txt"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$venv/wanted.txt"
    cp tests/conformance/requirements.txt "$venv/installed.txt"
fi
# The checks with llama.cpp need llama-cpp-python: a wheel where pip finds one, else a build of some ten minutes (a C++ compiler; cut off
# after 25, so that .ci/run stays within its time). Tried once for these requirements; DSQ_CONFORMANCE_LLAMA=0 leaves it out, and without
# it these checks are skipped.
if [ "${DSQ_CONFORMANCE_LLAMA:-1}" != 0 ] && [ ! -e "$venv/llama-tried" ]; then
    touch "$venv/llama-tried"
    if ! "$venv/bin/python" -c 'import llama_cpp' 2>/dev/null; then
        wanted="$(grep '^llama-cpp-python' tests/conformance/requirements.txt)"
        pip() { timeout 25m "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" "$wanted"; }
        # gcc 12 miscompiles llama.cpp's setup of AMX (README.md). -march=native names AMX behind whatever CFLAGS say, so the features are
        # named one by one instead.
        native="-DLLAVA_BUILD=OFF"
        if grep -qs amx_tile /proc/cpuinfo; then
            native="$native -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
            native="$native -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
        fi
        pip --only-binary llama-cpp-python 2>/dev/null ||
            CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" CMAKE_ARGS="$native" pip --no-binary llama-cpp-python ||
            echo "no llama-cpp-python: its checks are skipped"
    fi
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
