#!/usr/bin/env python3
"""What dsq writes, loaded by several versions of the tools that own the formats: transformers, compressed-tensors and gguf.

    python versions.py --dsq target/release/dsq [--cache FOLDER] [--out versions.txt]

Runs the checks of run.py that load our files, once with the versions of requirements.txt (those of the Python that runs this) and once with each older
set below, whose packages are laid over them (PYTHONPATH; torch stays). Prints a table: a line for each kind of check, a column for each set; exit code 1
when a check fails that is not known to fail with that version. What is known to fail, and why, stands in the sets: it is counted apart, and a known failure
that passes is told (the entry can go).
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent

# The checks of run.py that load what dsq wrote, and float models as a control of the tool itself.
CHECKS = ["float-logits", "export-codes", "export-logits", "requantized-codes", "activation-logits", "float-coded-logits", "gguf-values", "gguf-bytes"]

# Packages over those of requirements.txt, and what is known to fail: a part of the check's name, a part of its message, and why.
OLDER = [
    {
        "with": ["transformers==5.12.1"],
        "alone": ["compressed-tensors==0.17.1", "gguf==0.18.0", "loguru", "pydantic"],
        "known": [
            ("w3a16", "", "3-bit codes are packed across words since a later compressed-tensors; this one keeps ten to a word"),
            ("deepseek_v2", "", "transformers 5.12 computes deepseek_v2 otherwise (the float model alone shows it)"),
        ],
    },
    {
        "with": ["transformers==4.57.6"],
        "alone": ["compressed-tensors==0.12.2", "gguf==0.17.1"],
        "known": [
            ("", "decompress_module", "the check asks for a function that this compressed-tensors does not have; export-logits loads the same files"),
            ("w3a16", "", "3-bit codes are packed across words since a later compressed-tensors; this one keeps ten to a word"),
            ("float-coded-logits", "validation error", "this compressed-tensors does not know the field scale_dtype and refuses configs that have it"),
            ("deepseek_v2", "", "transformers 4.57 computes deepseek_v2 otherwise (the float model alone shows it)"),
            ("llama_tiny_llama3rope", "golden logits", "transformers 4.57 does not read the newer spelling of rotary scaling (rope_parameters)"),
        ],
    },
]

LINE = re.compile(r"^(PASS|FAIL|SKIP)  (([a-z0-9-]+) ?.*?): (.*)$")


def versions(path):
    code = "import transformers, compressed_tensors, importlib.metadata as m; print(transformers.__version__, m.version('compressed-tensors'), m.version('gguf'))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **path}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{path}: cannot be imported:\n{done.stderr}")
    return done.stdout.split()


def overlay(cache, older):
    """The folder with the packages of a set, installed where it is not there yet."""
    name = "-".join(p.replace("==", "-") for p in older["with"] + older["alone"] if "==" in p)
    folder = cache / "versions" / name
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(partial)]
        subprocess.run([*pip, *older["with"]], check=True)
        # compressed-tensors would bring a torch of its own.
        subprocess.run([*pip, "--no-deps", *older["alone"]], check=True, stderr=subprocess.DEVNULL)
        partial.rename(folder)
    return {"PYTHONPATH": str(folder)}


def run(dsq, path, known):
    """Counts by kind of check and outcome, and lines worth telling."""
    words = [sys.executable, str(HERE / "run.py"), "--dsq", str(dsq), *CHECKS]
    done = subprocess.run(words, env={**os.environ, **path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    counts, told, used = collections.defaultdict(collections.Counter), [], set()
    for line in done.stdout.splitlines():
        match = LINE.match(line)
        if not match:
            continue
        outcome, name, kind, message = match.groups()
        if outcome == "FAIL":
            why = next((k for k in known if k[0] in name and k[1] in message), None)
            if why:
                outcome = "KNOWN"
                used.add(why)
            else:
                told.append(f"FAIL {name}: {message}")
        elif outcome == "SKIP":
            told.append(f"SKIP {name}: {message}")
        counts[kind][outcome] += 1
    told += [f"no longer fails: {k[0] or 'any check'} ({k[2]})" for k in known if k not in used]
    if not counts:
        told.append("FAIL run.py: no check ran:\n" + done.stdout[-2000:])
    return counts, told, sorted({k[2] for k in used})


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--dsq", type=pathlib.Path, default=HERE.parents[1] / "target" / "release" / "dsq")
    ap.add_argument("--cache", type=pathlib.Path, default=pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "dsq")
    ap.add_argument("--out", type=pathlib.Path)
    args = ap.parse_args()
    sets = [({}, [])] + [(overlay(args.cache, o), o["known"]) for o in OLDER]
    columns, bad, lines = [], False, []
    for path, known in sets:
        names = versions(path)
        counts, told, why = run(args.dsq, path, known)
        columns.append(("transformers {}\ncompressed-tensors {}\ngguf {}".format(*names).split("\n"), counts))
        bad |= any(t.startswith(("FAIL", "SKIP")) for t in told)
        lines += [f"with transformers {names[0]}, compressed-tensors {names[1]}, gguf {names[2]}:"]
        lines += [f"  {t}" for t in told] + [f"  known: {w}" for w in why] or []
    kinds = [k for k in CHECKS if any(k in c for _, c in columns)]
    table = [["", *(h[i] for h, _ in columns)] for i in range(3)]
    for kind in kinds:
        cells = []
        for _, counts in columns:
            c = counts[kind]
            total = sum(c.values())
            cells.append(f"{c['PASS']} of {total}" + (f", {c['KNOWN']} known" if c["KNOWN"] else "") + (f", {c['FAIL']} FAIL" if c["FAIL"] else ""))
        table.append([kind, *cells])
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    text = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table)
    text += "\n\n" + "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)
    sys.exit(1 if bad else 0)


main()
