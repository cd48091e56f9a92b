#!/usr/bin/env python3
"""Makes the golden set of a version: small exported checkpoints of every format and scheme, with what that version's own dsq says of them.

    python3 regression/make_golden.py DSQ VERSION COMMIT DATE CAME HARDWARE
    python3 regression/make_golden.py --add DSQ VERSION HARDWARE

The second makes only what this script knows and the set lacks, beside what is there, which stays as it is. CAME is a line that says what came
with the version. HARDWARE is a file that `dsq regress --report` wrote on this machine. DSQ is that version's program; nothing else of it is needed, and only the standard library of Python. Writes regression/golden/VERSION:

    golden.json        what is there (read by src/regress/golden.rs)
    NAME/ or NAME.gguf an exported checkpoint, as DSQ wrote it
    recipes/*.toml     recipes of that version; golden.json holds what several seeds gave

and lists it, with digests, in regression/golden/versions.toml. The source is regression/golden/source, or source-text where a text is looked
at (calib.txt, a character a token); both made here once: weights from a fixed sequence of integers.

What golden.json says of an entry: the command and its options; SHA-256 of each file; for each quantized layer SHA-256 of its values (f32, little
endian), as DSQ's own export to a float folder gives them; the logits of fixed tokens, as DSQ's own runtime gives them; and the bound that
later versions must keep to, which docs/evaluation.md ("Across versions") derives. A scheme that DSQ does not know is left out, and said so.
"""

import hashlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent
GOLDEN = ROOT / "golden"
SOURCE = GOLDEN / "source"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
    "hidden_act": "silu", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "vocab_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "bos_token_id": 0,
    "eos_token_id": 0, "head_dim": 16, "tie_word_embeddings": True, "rope_theta": 10000.0, "torch_dtype": "float32",
}
# Of the entries that look at a text.
TEXT = GOLDEN / "source-text"
TEXT_CONFIG = CONFIG | {"intermediate_size": 64}
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
INDEX = GOLDEN / "versions.toml"
TOKENS = [[3, 17, 90, 41, 5, 66, 28, 71, 12, 54, 9, 80]]

# Widest sum of the source: intermediate_size.
K = 256
U = 2.0**-24
# Bounds on the change of a logit over the largest one. Float activations: a layer of eight sums and the head, in another order (k u each).
FLOAT = 9 * K * U
# Activations rounded to codes: the last bit of a sum may move one input of a layer across a rounding boundary. One step of a code is
# 1/q of the largest input; against the root of k inputs of that layer's smallest width (32), with largest values 3 deviations out on both
# sides, that is 9 / (q sqrt(32)) of an output; FP8 and FP4 round the largest value by 1/16 and 1/6 of itself.
STEP = {"int8": 9 / (127 * 32**0.5), "int4": 9 / (7 * 32**0.5), "fp8": 9 / (16 * 32**0.5), "fp4": 9 / (6 * 32**0.5)}


def quantize(name, *options, acts=None):
    return {"name": name, "command": "quantize", "options": list(options), "bound": STEP[acts] if acts else FLOAT}


def export(name, *options, of=None):
    return {"name": name, "command": "export", "options": list(options), "bound": FLOAT, "of": of}


def calibrated(name, *options, acts=None):
    look = ["--calib", "suite:calib.txt", "--calib-tokens", "256", "--calib-context", "32"]
    return quantize(name, *options, *look, acts=acts) | {"source": TEXT.name}


# Blocks are of 128 inputs, and only down_proj has as many.
IGNORED = [word for name in ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"] for word in ["--ignore", name]]
ENTRIES = [
    quantize("w4a16_g32", "--scheme", "W4A16", "--group-size", "32"),
    quantize("w4a16_g32_asymmetric", "--scheme", "W4A16", "--group-size", "32", "--asymmetric"),
    quantize("w4a16_g32_asymmetric_f16", "--scheme", "W4A16", "--group-size", "32", "--asymmetric", "--scale-dtype", "f16"),
    quantize("w4a16_channel_bf16", "--scheme", "W4A16", "--granularity", "channel", "--scale-dtype", "bf16"),
    quantize("w4a16_g32_f16", "--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f16"),
    quantize("w8a16_channel", "--scheme", "W8A16", "--granularity", "channel"),
    quantize("w3a16_g32", "--scheme", "W3A16", "--group-size", "32"),
    quantize("w2a16_g32", "--scheme", "W2A16", "--group-size", "32"),
    quantize("w8a8", "--scheme", "W8A8", acts="int8"),
    quantize("w4a8_g32", "--scheme", "W4A8", "--group-size", "32", acts="int8"),
    quantize("fp8_dynamic", "--scheme", "FP8_DYNAMIC", acts="fp8"),
    quantize("fp8_block", "--scheme", "FP8_BLOCK", *IGNORED, acts="fp8"),
    quantize("fp8a16", "--scheme", "FP8A16"),
    quantize("mxfp4", "--scheme", "MXFP4", acts="fp4"),
    quantize("mxfp4a16", "--scheme", "MXFP4A16"),
    quantize("nvfp4a16", "--scheme", "NVFP4A16"),
    export("gptq_g32", "--format", "gptq", of="w4a16_g32_f16"),
    export("gptq_v2_asymmetric", "--format", "gptq", "--gptq-version", "v2", of="w4a16_g32_asymmetric_f16"),
    export("awq_g32_asymmetric", "--format", "awq", of="w4a16_g32_asymmetric_f16"),
    export("q4_0.gguf", "--format", "gguf", "--gguf-type", "Q4_0"),
    export("q4_1.gguf", "--format", "gguf", "--gguf-type", "Q4_1"),
    export("q8_0.gguf", "--format", "gguf", "--gguf-type", "Q8_0"),
    export("q4_k_m.gguf", "--format", "gguf", "--gguf-type", "Q4_K_M"),
    calibrated("fp8_static", "--scheme", "FP8", acts="fp8"),
    calibrated("nvfp4", "--scheme", "NVFP4", acts="fp4"),
    calibrated("w8a8_static", "--scheme", "W8A8", "--static-activations", acts="int8"),
    calibrated("w8a8_static_asymmetric", "--scheme", "W8A8", "--static-activations", "--asymmetric-activations", acts="int8"),
    calibrated("w4a8_static_g32", "--scheme", "W4A8", "--group-size", "32", "--static-activations", acts="int8"),
    calibrated("w4a4_static_g32", "--scheme", "W4A4", "--group-size", "32", acts="int4"),
    calibrated("w4a16_gptq", "--scheme", "W4A16", "--group-size", "32", "--method", "gptq"),
    calibrated("w4a16_awq", "--scheme", "W4A16", "--group-size", "32", "--asymmetric", "--method", "awq"),
    calibrated("w4a16_kv_int8", "--scheme", "W4A16", "--group-size", "32", "--kv-cache", "int8"),
]

# A recipe of seconds; what a version's training gives from several seeds is what later versions are expected to give.
RECIPE = """name = "micro"
seed = 1
[model]
architecture = "llama"
vocab_size = 1024
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 32
[data]
train = "../../../../recipes/data/pydoc/train.txt"
heldout = "../../../../recipes/data/pydoc/heldout.txt"
tokenizer = "../../../../recipes/data/pydoc/tokenizer.json"
[train]
steps = 20
batch_size = 4
seq_len = 32
learning_rate = 3e-3
[qat]
steps = 10
learning_rate = 5e-4
float_equal_tokens = false
[quant]
scheme = "W4A16"
group_size = 32
[export]
format = "compressed-tensors"
[eval]
context = 32
max_tokens = 2048
"""
# small trains far enough that an untrained model (perplexity 1024 or so) lies well outside of its interval; micro's reaches nearly there. Seeds end
# as far apart in it as in micro: 311.7 +- 54.3 and 865.4 +- 121.8.
RECIPES = {
    "micro": RECIPE,
    "small": RECIPE.replace('"micro"', '"small"').replace("steps = 20\nbatch_size = 4", "steps = 200\nbatch_size = 8")
    .replace("steps = 10\n", "steps = 40\n").replace("max_tokens = 2048", "max_tokens = 8192"),
}
SEEDS = [1, 2, 3, 4, 5]


def integers(count, state):
    """Integers of -2^15 .. 2^15 by a linear congruence (Knuth's MMIX), the same everywhere."""
    out = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 48) - 2**15)
    return out


def make_source(folder, c):
    h, heads, kv, inner = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["intermediate_size"]
    d = c["head_dim"]
    shapes = {"model.embed_tokens.weight": [c["vocab_size"], h], "model.norm.weight": [h]}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            p + "self_attn.q_proj.weight": [heads * d, h], p + "self_attn.k_proj.weight": [kv * d, h],
            p + "self_attn.v_proj.weight": [kv * d, h], p + "self_attn.o_proj.weight": [h, heads * d],
            p + "mlp.gate_proj.weight": [inner, h], p + "mlp.up_proj.weight": [inner, h], p + "mlp.down_proj.weight": [h, inner],
            p + "input_layernorm.weight": [h], p + "post_attention_layernorm.weight": [h],
        }
    header, data = {}, b""
    for i, (name, shape) in enumerate(sorted(shapes.items())):
        count = 1
        for s in shape:
            count *= s
        # Two values summed are denser near zero, as weights are; multiples of 2^-18, exact in f32.
        raw = integers(2 * count, 1000 + i)
        values = [(a + b) / 2**18 for a, b in zip(raw[::2], raw[1::2])]
        if len(shape) == 1:
            values = [1 + v for v in values]
        blob = struct.pack(f"<{count}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(c, indent=1) + "\n")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def make_text():
    """The second source, with a tokenizer for which each printable character is a token, and a text to look at."""
    make_source(TEXT, TEXT_CONFIG)
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?s:.)"}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(CHARACTERS)}, "unk_token": " "},
    }
    (TEXT / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
    text = (ROOT.parent / "recipes/data/pydoc/heldout.txt").read_text(encoding="utf-8")
    (GOLDEN / "calib.txt").write_text("".join(c for c in text if c in CHARACTERS)[:2048])


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    at = 8 + length
    return {n: (t["dtype"], raw[at + t["data_offsets"][0] : at + t["data_offsets"][1]]) for n, t in header.items()}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def run(dsq, *args):
    done = subprocess.run([dsq, *map(str, args), "--json", "--threads", "2"], capture_output=True, text=True)
    if done.returncode != 0:
        try:
            said = json.loads(done.stderr.splitlines()[-1])["error"]["message"]
        except (ValueError, IndexError, KeyError):
            said = done.stderr.strip()
        raise RuntimeError(said or f"exit code {done.returncode}")
    return done.stdout


def values_of(dsq, checkpoint, scratch):
    """SHA-256 of each layer's values as dsq decodes them, of the layers that are codes: f32, little endian."""
    out = scratch / "floats"
    run(dsq, "export", checkpoint, "--out", out, "--format", "safetensors", "--dtype", "f32")
    found = {}
    for name, (dtype, raw) in read_safetensors(out / "model.safetensors").items():
        assert dtype == "F32", f"{name}: {dtype}"
        if "_proj" in name:
            found[name.removesuffix(".weight")] = sha256(raw)
    return dict(sorted(found.items()))


def logits_of(dsq, checkpoint, scratch):
    ids, out = scratch / "ids.json", scratch / "logits.safetensors"
    ids.write_text(json.dumps(TOKENS))
    run(dsq, "eval", checkpoint, "--tokens-file", ids, "--context", len(TOKENS[0]), "--logits-out", out)
    dtype, raw = read_safetensors(out)["logits.0"]
    assert dtype == "F32"
    # The last row: every position has gone into it.
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))[-CONFIG["vocab_size"] :]


def index(version, commit, date, came):
    """Writes versions.toml with this version in it; the others stay as they are."""
    old = tomllib.loads(INDEX.read_text()) if INDEX.exists() else {"version": []}
    listed = {v["version"]: v for v in old["version"]}
    came = came or listed[version]["came"]
    files = [f"{version}/golden.json", *sorted(p.relative_to(GOLDEN).as_posix() for p in (GOLDEN / version / "recipes").iterdir())]
    digests = {name.removeprefix(f"{version}/"): sha256((GOLDEN / name).read_bytes()) for name in files}
    listed[version] = {"version": version, "commit": commit, "date": date, "came": came, "files": digests}
    beside = [GOLDEN / "calib.txt", *sorted(SOURCE.iterdir()), *sorted(TEXT.iterdir())]
    quoted = json.dumps
    lines = ["# The golden sets that there must be, with SHA-256 of what golden.json does not speak of. Written by regression/make_golden.py.", "", "[files]"]
    lines += [f"{quoted(p.relative_to(GOLDEN).as_posix())} = {quoted(sha256(p.read_bytes()))}" for p in beside]
    for v in sorted(listed.values(), key=lambda v: [int(n) for n in v["version"].split(".")]):
        lines += ["", "[[version]]", *(f"{k} = {quoted(v[k], ensure_ascii=False)}" for k in ["version", "commit", "date", "came"])]
        lines += ["[version.files]", *(f"{quoted(name)} = {quoted(sha)}" for name, sha in v["files"].items())]
    INDEX.write_text("\n".join(lines) + "\n")


def make(dsq, partial, entry, hardware):
    """Makes one entry in `partial` and says what golden.json says of it."""
    name = entry["name"]
    source = partial / entry["of"] if entry.get("of") else pathlib.Path(entry.get("source", "source"))
    target = partial / name
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        try:
            if not source.exists():
                raise RuntimeError(f"{entry['of']} is left out")
            run(dsq, entry["command"], source, "--out", target, *(o.removeprefix("suite:") for o in entry["options"]))
            values, logits = values_of(dsq, target, scratch), logits_of(dsq, target, scratch)
        except RuntimeError:
            if target.is_dir():
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
            raise
    files = sorted(p for p in partial.rglob("*") if p.is_file() and (target in p.parents or p.name.startswith(target.name)))
    print(f"{name}: {sum(p.stat().st_size for p in files)} bytes, {len(values)} layers", file=sys.stderr)
    # A sum of floats decides these codes.
    where = {"hardware": hardware} if "--calib" in entry["options"] else {}
    return {**entry, "files": {p.relative_to(partial).as_posix(): sha256(p.read_bytes()) for p in files},
            "values": values, "logits": logits, **where}


def make_recipe(dsq, partial, name):
    """Trains a recipe with several seeds."""
    recipe = partial / "recipes" / f"{name}.toml"
    recipe.parent.mkdir(exist_ok=True)
    recipe.write_text(RECIPES[name])
    perplexities = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as scratch:
            report = json.loads(run(dsq, "train", recipe, "--out", f"{scratch}/run", "--set", f"seed={seed}"))
        (row,) = [r for r in report["rows"] if r["name"] == "exported"]
        perplexities.append(row["perplexity"])
    print(f"{name}: {perplexities}", file=sys.stderr)
    return {"file": f"recipes/{name}.toml", "row": "exported", "metric": "perplexity", "seeds": SEEDS, "values": perplexities}


def main():
    words = sys.argv[1:]
    add = words[:1] == ["--add"]
    if add:
        dsq, version, report = words[1:]
        came = None
    else:
        dsq, version, commit, date, came, report = words
    dsq = str(pathlib.Path(dsq).resolve())
    hardware = json.loads(pathlib.Path(report).read_text())["setup"]["hardware"]
    # Relative names in what dsq writes about its source.
    GOLDEN.mkdir(exist_ok=True)
    os.chdir(GOLDEN)
    if not SOURCE.exists():
        make_source(SOURCE, CONFIG)
    if not TEXT.exists():
        make_text()
    out = pathlib.Path(version)
    if out.exists() and not add:
        sys.exit(f"{out}: expected nothing there, got a golden set: a version's set is made once (--add makes what it lacks)")
    partial = pathlib.Path(f".{version}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if add:
        # A copy, so that a set is never half made.
        shutil.copytree(out, partial)
        golden = json.loads((partial / "golden.json").read_text())
        commit, date = golden["commit"], golden["date"]
    else:
        partial.mkdir()
        golden = {"format": 1, "version": version, "commit": commit, "date": date, "source": "source", "tokens": TOKENS,
                  "entries": [], "recipes": [], "left_out": []}
    there = {e["name"] for e in golden["entries"] + golden["left_out"]}
    for entry in ENTRIES:
        if entry["name"] in there:
            continue
        try:
            golden["entries"].append(make(dsq, partial, entry, hardware))
        except RuntimeError as problem:
            golden["left_out"].append({"name": entry["name"], "because": str(problem)})
            print(f"left out {entry['name']}: {problem}", file=sys.stderr)
    trained = {r["file"] for r in golden["recipes"]}
    golden["recipes"] += [make_recipe(dsq, partial, name) for name in RECIPES if f"recipes/{name}.toml" not in trained]
    (partial / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    if add:
        shutil.rmtree(out)
    partial.rename(out)
    index(version, commit, date, came)
    print(f"{GOLDEN / out}: {len(golden['entries'])} checkpoints, {len(golden['left_out'])} left out", file=sys.stderr)


main()
