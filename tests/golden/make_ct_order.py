"""Makes ct_order_{symmetric,asymmetric}: llama_tiny as compressed-tensors stored it with "actorder": "group", groups of inputs that are
no runs. Version 0.12.2 of the package has that order (0.20 took it out); its own functions quantize, pack and unpack here.

Usage: pip install --no-deps --target /tmp/ct compressed-tensors==0.12.2; PYTHONPATH=/tmp/ct python make_ct_order.py (in this folder).
"""

import hashlib
import json
import pathlib

import torch
from compressed_tensors import __version__
from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

assert __version__.startswith("0.12"), __version__
HERE = pathlib.Path(__file__).resolve().parent
GROUP = 32

for seed, (name, symmetric) in enumerate([("symmetric", True), ("asymmetric", False)]):
    g = torch.Generator().manual_seed(7000 + seed)
    config = json.loads((HERE / "llama_tiny" / "config.json").read_text())
    tensors, values, orders = {}, {}, {}
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, symmetric=symmetric, actorder="group")
    for key, w in load_file(HERE / "llama_tiny" / "model.safetensors").items():
        if "_proj" not in key:
            tensors[key] = w
            continue
        module, (n, k) = key.removesuffix(".weight"), w.shape
        # Layers that read one tensor share an order, as GPTQ gives it.
        orders.setdefault((module.rsplit(".", 1)[0], k), torch.randperm(k, generator=g))
        perm = orders[(module.rsplit(".", 1)[0], k)]
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[perm] = (torch.arange(k) // GROUP).int()
        groups = w[:, torch.argsort(g_idx, stable=True)].reshape(n, -1, GROUP)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        scale = scale.half().float()
        codes = quantize(x=w, scale=scale, zero_point=zero, args=args, dtype=torch.int8, g_idx=g_idx)
        tensors[f"{module}.weight_packed"] = packed = pack_to_int32(codes, 4)
        tensors[f"{module}.weight_scale"] = scale.half()
        tensors[f"{module}.weight_shape"] = torch.tensor([n, k])
        tensors[f"{module}.weight_g_idx"] = g_idx
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = pack_to_int32(zero.to(torch.int8), 4, packed_dim=0).contiguous()
            zero = unpack_from_int32(tensors[f"{module}.weight_zero_point"], 4, zero.shape, packed_dim=0)
        back = dequantize(unpack_from_int32(packed, 4, w.shape), scale, zero, g_idx=g_idx, args=args)
        # A zero has no sign.
        values[module] = hashlib.sha256((back + 0.0).numpy().tobytes()).hexdigest()
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}},
    }
    out = HERE / f"ct_order_{name}"
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "values.json").write_text(json.dumps(values, indent=0) + "\n")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
