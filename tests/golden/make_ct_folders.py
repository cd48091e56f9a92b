"""Makes ct_folder_{symmetric,asymmetric}: llama_tiny_untied as the Python package compressed-tensors writes it.

Usage: python make_ct_folders.py (in this folder). Versions: VERSIONS.txt.
"""

import pathlib
import shutil
import tempfile

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
GROUP = 32

for name, symmetric in [("symmetric", True), ("asymmetric", False)]:
    model = AutoModelForCausalLM.from_pretrained(HERE / "llama_tiny_untied", dtype=torch.float32)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format="pack-quantized")
    apply_quantization_config(model, config)
    for _, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        groups = module.weight.data.reshape(module.weight.shape[0], -1, GROUP)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), module.quantization_scheme.weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    out = HERE / f"ct_folder_{name}"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temp:
        model.save_pretrained(temp)
        compressor.update_config(temp)
        for file in ["config.json", "model.safetensors"]:
            shutil.copy(pathlib.Path(temp) / file, out / file)
