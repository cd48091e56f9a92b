"""The packing and unpacking functions of GPTQModel and AutoAWQ, taken out of their source archives and run by themselves.

The packages need a GPU (or much else) to be imported; these functions are plain torch and numpy. Nothing of them is kept here: they are
compiled from the archives that run.sh downloads (gptqmodel-7.7.0, autoawq-0.2.9), or that the first argument of
tests/golden/columns/make_golden.py names.
"""

import ast
import contextlib
import math
import pathlib
import tarfile
import types

import numpy as np
import torch

ARCHIVES = {"gptqmodel": "gptqmodel-7.7.0", "autoawq": "autoawq-0.2.9"}
FILES = {
    "layer": ("gptqmodel", "gptqmodel/nn_modules/qlinear/__init__.py"),
    "zeros": ("gptqmodel", "gptqmodel/utils/model_dequant.py"),
    "awq_words": ("autoawq", "awq/utils/packing_utils.py"),
    "awq_layer": ("autoawq", "awq/modules/linear/gemm.py"),
}


def functions(source, wanted, names):
    """The functions `wanted` of a source text, methods too, without decorators, in a namespace of `names`."""
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name in wanted]
    for node in found:
        node.decorator_list = []
    out = dict(names)
    # Of methods with one name in several classes the first counts.
    code = ast.Module(body=found[::-1], type_ignores=[])
    code.body.insert(0, ast.ImportFrom(module="__future__", names=[ast.alias(name="annotations")], level=0))
    exec(compile(ast.fix_missing_locations(code), "peer", "exec"), out)
    missing = [w for w in wanted if w not in out]
    if missing:
        raise RuntimeError(f"the peer's source has no {missing}")
    return types.SimpleNamespace(**{w: out[w] for w in wanted})


class Peers:
    def __init__(self, folder):
        def text(key):
            package, path = FILES[key]
            name = ARCHIVES[package]
            with tarfile.open(pathlib.Path(folder) / f"{name}.tar.gz") as archive:
                return archive.extractfile(f"{name}/{path}").read().decode()

        class Nothing:
            pass

        names = {
            "t": torch, "torch": torch, "np": np, "math": math, "nn": torch.nn, "_ConvNd": torch.nn.modules.conv._ConvNd,
            "transformers": types.SimpleNamespace(pytorch_utils=types.SimpleNamespace(Conv1D=Nothing)),
            "THREADPOOLCTL": types.SimpleNamespace(threadpool_limits=lambda n: contextlib.nullcontext()),
        }
        self.layer = functions(
            text("layer"),
            ["pack_original", "dequantize_weight", "_dequantize_from_codes", "_init_wf_unsqueeze_buffers", "_torch_right_shift",
             "_torch_left_shift"],
            names)
        wanted = ["_correct_gptq_v1_qzeros", "_revert_gptq_v1_qzeros_correction", "_shift_gptq_qzeros", "unpack_cols", "pack_cols"]
        source = text("zeros")
        tops = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
        more = [n for n in tops if ("pack" in n or "3bit" in n) and n not in wanted]
        self.zeros = functions(source, wanted + more, {**names, "PLANAR_BITS": ()})
        self.awq = functions(
            text("awq_words"), ["unpack_awq", "reverse_awq_order"],
            {"torch": torch, "AWQ_REVERSE_ORDER": next(
                ast.literal_eval(n.value) for n in ast.parse(text("awq_words")).body
                if isinstance(n, ast.Assign) and n.targets[0].id == "AWQ_REVERSE_ORDER")})
        self.awq_layer = functions(text("awq_layer"), ["from_linear"], {**names, "get_best_device": lambda: "cpu"})

    def gptq_layer(self, bits, k, g_idx):
        layer = types.SimpleNamespace(
            bits=bits, maxq=2**bits - 1, pack_factor=32 // bits, pack_dtype_bits=32, pack_dtype=torch.int32, planar=False,
            pack_np_math_dtype=np.uint32, pack_np_dtype=np.int32, g_idx=g_idx, enable_wf_unsqueeze=True, _buffers={},
            dequant_dtype=torch.int16 if bits == 8 else torch.int8, in_features=k)
        layer.register_buffer = lambda name, value, persistent=True: setattr(layer, name, value)
        layer._wf_device = lambda: torch.device("cpu")
        for name in ["_init_wf_unsqueeze_buffers", "_dequantize_from_codes", "dequantize_weight"]:
            setattr(layer, name, types.MethodType(getattr(self.layer, name), layer))
        return layer

    def gptq_pack(self, bits, codes, scales, zeros, g_idx, version):
        """The tensors of unsigned `codes` [n, k], `scales` (f16 numbers) and `zeros` [n, groups]."""
        index = g_idx.long()
        weight = (codes - zeros[:, index]).double() * scales.double()[:, index]
        layer = self.gptq_layer(bits, codes.shape[1], g_idx)
        linear = types.SimpleNamespace(weight=types.SimpleNamespace(data=weight), bias=None)
        self.layer.pack_original(layer, linear, scales.double(), zeros.double(), g_idx)
        qzeros = layer.qzeros
        if version == 1:
            qzeros = self.zeros._revert_gptq_v1_qzeros_correction(qzeros, bits)
        return {"qweight": layer.qweight, "qzeros": qzeros, "scales": layer.scales, "g_idx": g_idx.int()}

    def gptq_values(self, bits, tensors, version):
        """The weight [n, k] in f32, without a rounding: codes by the peer, multiplied in f32."""
        k = tensors["g_idx"].shape[0] if "g_idx" in tensors else tensors["qweight"].shape[0] * 32 // bits
        layer = self.gptq_layer(bits, k, tensors["g_idx"])
        layer.qweight, layer.scales, layer.qzeros = tensors["qweight"], tensors["scales"].float(), tensors["qzeros"]
        if version == 1:
            layer.qzeros = self.zeros._correct_gptq_v1_qzeros(layer.qzeros, bits)
        # 8-bit codes are taken as int16, so that no difference overflows.
        layer.dequant_dtype = torch.int16
        return layer.dequantize_weight().T.contiguous()

    def awq_pack(self, codes, scales, zeros):
        class Layer:
            def __init__(self, *args):
                self.w_bit, self.group_size, self.in_features, self.out_features = args[:4]

        k, groups = codes.shape[1], scales.shape[1]
        index = torch.arange(k) // (k // groups)
        weight = (codes - zeros[:, index]).double() * scales.double()[:, index]
        linear = types.SimpleNamespace(
            in_features=k, out_features=codes.shape[0], bias=None, weight=types.SimpleNamespace(data=weight, device="cpu"))
        # The peer multiplies zeros and scales as they are given, and divides by the halves.
        layer = self.awq_layer.from_linear(Layer, linear, 4, k // groups, False, scales.double().T.contiguous(),
                                           zeros.double().T.contiguous())
        return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}

    def awq_values(self, tensors):
        codes, zeros = self.awq.unpack_awq(tensors["qweight"], tensors["qzeros"], 4)
        codes, zeros = self.awq.reverse_awq_order(codes, zeros, 4)
        codes, zeros = codes & 15, zeros & 15
        each = codes.shape[0] // zeros.shape[0]
        spread = lambda x: x.repeat_interleave(each, dim=0)
        return ((codes - spread(zeros)).float() * spread(tensors["scales"].float())).T.contiguous()
