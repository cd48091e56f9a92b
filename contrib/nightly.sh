#!/usr/bin/env bash
# One nightly run in this clone: builds, fetches what is missing, runs the nightly suite, and keeps the results of each night in a folder of
# its own, the last 90 of them.
#     bash contrib/nightly.sh FOLDER
# Exit code: that of the suite (0 ok, 1 a check failed, 3 a baseline or golden set cannot be used), or of what broke before it.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:?expected the folder that keeps the results}"
out="$folder/$(date -u +%Y-%m-%dT%H%M%SZ)"
mkdir -p "$out"
ln -sfn "$out" "$folder/latest"
{
    bash .ci/fetch-models.sh --tasks
    cargo build --release --workspace --locked
} > "$out/build.txt" 2>&1
dsq="${CARGO_TARGET_DIR:-target}/release/dsq"
code=0
"$dsq" regress nightly --report "$out/nightly.json" --html "$out/nightly.html" --junit "$out/nightly.xml" > "$out/nightly.txt" 2>&1 || code=$?
"$dsq" regress nightly --history > "$out/history.txt" 2>&1 || true
tail -n 20 "$out/nightly.txt"
# The names of nights sort by time.
find "$folder" -mindepth 1 -maxdepth 1 -type d -name '20*' | sort | head -n -90 | xargs -r rm -rf --
exit "$code"
