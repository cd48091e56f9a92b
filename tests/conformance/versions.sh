#!/usr/bin/env bash
# versions.py with the environment that run.sh makes. Extra arguments go to versions.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv="${XDG_CACHE_HOME:-$HOME/.cache}/dsq/conformance"
# Makes the environment; of the checks only the list.
bash tests/conformance/run.sh --list > /dev/null
exec "$venv/bin/python" tests/conformance/versions.py --dsq "${CARGO_TARGET_DIR:-target}/release/dsq" "$@"
